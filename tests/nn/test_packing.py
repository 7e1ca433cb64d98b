"""Arrays that travel as one."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlsvc.nn.packing import pack, unpack

DTYPES = st.sampled_from(["uint8", "int8", "int32", "uint32", "float32", "float16", "bool", "int16"])
ARRAYS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(max_dims=3, max_side=4, min_side=0))),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=40)  # every new shape compiles
@given(ARRAYS)
def test_what_is_packed_comes_out_bit_for_bit(arrays: dict[str, np.ndarray]) -> None:
    packed, layout = pack(arrays)
    out = unpack(jax.device_put(packed), layout)
    assert list(out) == list(arrays)
    for name, x in arrays.items():
        got = np.asarray(out[name])
        assert (got.dtype, got.shape) == (x.dtype, x.shape)
        assert got.tobytes() == x.tobytes()


def test_wide_numbers_are_sent_in_the_types_of_jax() -> None:
    packed, layout = pack({"x": np.asarray([1.5, -2.0]), "n": np.asarray([-3])})
    out = unpack(jax.device_put(packed), layout)
    assert out["x"].dtype == np.float32
    assert out["x"].tolist() == [1.5, -2.0]
    assert out["n"].dtype == np.int32
    assert out["n"].tolist() == [-3]


def test_arrays_that_do_not_lie_in_order_are_packed_in_order() -> None:
    x = np.arange(6, dtype=np.int32).reshape(2, 3).T
    packed, layout = pack({"x": x})
    assert unpack(jax.device_put(packed), layout)["x"].tolist() == x.tolist()
