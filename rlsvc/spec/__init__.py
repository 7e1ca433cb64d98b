"""All that a person may write in YAML, as frozen pydantic classes. Imports no jax, torch or ray."""
