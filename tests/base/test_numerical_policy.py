"""Numerical policies as values: kept in files, sent to other processes, and compared in words."""

import copy
import json
import pickle

import pytest

from spmd_worker.base.numerical_policy import DEVICE, NORM, NumericalPolicy, Region

POLICY = NumericalPolicy({NORM: Region("native", "v1", {"eps": 1e-6}), DEVICE: Region("cpu", "", {"dtype": "float32"})})


def test_policy_survives_pickle_copy_and_json():
    read = NumericalPolicy.from_dict(json.loads(json.dumps(POLICY.as_dict())))
    for other in (pickle.loads(pickle.dumps(POLICY)), copy.deepcopy(POLICY), read):
        assert (other, other.digest) == (POLICY, POLICY.digest)


def test_difference_leaves_out_a_missing_version():
    other = NumericalPolicy({**POLICY.regions, DEVICE: Region("cpu", "", {"dtype": "bfloat16"})})
    assert POLICY.difference(other) == "device: cpu, dtype float32, and cpu, dtype bfloat16"


@pytest.mark.parametrize("value", [{}, {"regions": []}, {"digest": "", "regions": {"norm": {"kind": 1}}}])
def test_other_objects_are_refused(value: dict[str, object]):
    with pytest.raises(ValueError, match="not the object of a numerical policy"):
        NumericalPolicy.from_dict(value)
