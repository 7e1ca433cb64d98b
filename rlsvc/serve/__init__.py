"""Policies behind an endpoint: HTTP and openpi's WebSocket on a Ray Serve application.

`batcher` and `service` know no protocol, `codec` and `app` know no Ray, `replica`, `deploy` and `haproxy` are the part
that does.
"""
