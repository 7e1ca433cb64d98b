import pytest

from rlsvc.core import errors
from rlsvc.core.errors import UserError, nearest, unknown_name


def test_the_nearest_name_is_found_and_a_far_one_is_not_guessed():
    assert nearest("pusht_difusion", ["pusht_demo", "pusht_diffusion"]) == "pusht_diffusion"
    assert nearest("xyz", ["pusht_demo", "pusht_diffusion"]) is None
    assert nearest("anything", []) is None


def test_an_unknown_name_lists_the_choices_with_the_nearest_first():
    message = str(unknown_name("policy", "difusion", ["zero", "diffusion"]))
    assert message == "unknown policy 'difusion'. Did you mean 'diffusion'? There are: diffusion, zero."
    assert str(unknown_name("policy", "x", [])) == "unknown policy 'x'. There are: none."


@pytest.mark.parametrize(
    "kind", ["SpecError", "ContractError", "DatasetError", "BundleError", "NotFoundError", "BusyError"]
)
def test_every_error_meant_for_a_person_is_caught_as_one(kind):
    assert issubclass(getattr(errors, kind), UserError)
