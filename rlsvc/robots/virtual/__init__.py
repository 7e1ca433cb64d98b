"""Virtual hardware: it speaks the real wire protocols, so that real driver code runs against it."""
