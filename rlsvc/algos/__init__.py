"""How a policy learns, one file each. `ALGORITHMS` is the table."""

from rlsvc.algos.imitation import Imitation

ALGORITHMS = {"imitation": Imitation}
