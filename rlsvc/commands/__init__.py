"""One module of Typer commands a group; rlsvc/cli.py mounts them."""
