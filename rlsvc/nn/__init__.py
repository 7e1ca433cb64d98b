"""Nets in flax nnx. Compute dtype is an argument; weights are float32."""
