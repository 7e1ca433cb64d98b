"""What lies on disk: bundles, checkpoints, tracking and the model registry."""
