"""What every part shares: contracts, array types, errors, the wire codec. Imports numpy and msgpack only."""
