"""The Open Inference Protocol, with Triton's own client, and bytes that are no request."""

import contextlib
import json

import httpx
import numpy as np
import orjson
import pytest
import tritonclient.http as triton
from serving_fakes import CONTRACT, POISON, FakeRunner, expected_action, observation, service_of, serving
from starlette.testclient import TestClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from rlsvc.serve.app import build_app
from rlsvc.serve.codec import RequestError
from rlsvc.serve.oip import HEADER_LENGTH, decode_infer

INFER = "/v2/models/fake/infer"


@pytest.fixture(scope="module")
def url():
    with serving(FakeRunner(), max_body_bytes=100_000) as url:
        yield url


@pytest.fixture
def client(url):
    with triton.InferenceServerClient(url) as client:
        yield client


def window(value: float = 1.0) -> dict[str, np.ndarray]:
    return {**observation(value), "task": np.array(["push the T"] * 2, object)}


def inputs(given: dict[str, np.ndarray], binary: bool) -> list[triton.InferInput]:
    out = []
    for name, array in given.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, binary_data=binary)
        out.append(tensor)
    return out


def test_tritons_client_finds_the_server_and_what_its_model_takes(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("fake")
    assert client.is_model_ready("fake", "fake-1")
    assert not client.is_model_ready("fake", "other")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    found = client.get_model_metadata("fake")
    assert found["versions"] == ["fake-1"]
    assert found["inputs"] == [
        {"name": "observation.state", "datatype": "FP32", "shape": [2, 3]},
        {"name": "observation.image", "datatype": "UINT8", "shape": [2, 4, 4, 3]},
        {"name": "task", "datatype": "BYTES", "shape": [2]},
    ]
    assert found["outputs"] == [{"name": "action", "datatype": "FP32", "shape": [4, 2]}]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritons_client_gets_the_actions_as_json_and_as_bytes(client, binary_in, binary_out):
    given = window(2.0)
    answer = client.infer(
        "fake", inputs(given, binary_in), outputs=[triton.InferRequestedOutput("action", binary_data=binary_out)],
        request_id="r1", parameters={"seed": 5, "step": 8},
    )  # fmt: skip
    want = expected_action(given["observation.state"], 5, 8)
    np.testing.assert_array_equal(answer.as_numpy("action"), want)
    response = answer.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("r1", "fake", "fake-1")
    assert response["parameters"]["batch_size"] == 1
    assert response["parameters"]["expires_in_ms"] == 400.0
    assert ("data" in response["outputs"][0]) != binary_out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"observation.state": np.zeros((2, 4), np.float32)}, r"expected \(2, 3\)"),
        ({"observation.stat": np.zeros((2, 3), np.float32)}, "observation.stat"),
        ({"observation.state": np.full((2, 3), np.nan, np.float32)}, "finite"),
        ({"observation.state": np.full((2, 3), POISON, np.float32)}, "internal error; request id"),
    ],
)
def test_tritons_client_is_told_what_does_not_fit(client, changes, says):
    with pytest.raises(InferenceServerException, match=says):
        client.infer("fake", inputs({**window(), **changes}, True))
    with pytest.raises(InferenceServerException, match="unknown model 'fak'"):
        client.infer("fak", inputs(window(), True))
    with pytest.raises(InferenceServerException, match="there is 'action' alone"):
        client.infer("fake", inputs(window(), True), outputs=[triton.InferRequestedOutput("actions")])
    with pytest.raises(InferenceServerException, match="content encoding 'gzip'"):
        client.infer("fake", inputs(window(), True), request_compression_algorithm="gzip")


def test_a_body_over_the_limit_is_refused(url):
    assert httpx.post(f"http://{url}{INFER}", content=b"x" * 200_000).status_code == 413


def tensor(**changes):
    return {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2], **changes}


def body_of(**changes) -> bytes:
    return json.dumps({"inputs": [tensor()], **changes}).encode()


def binary_of(data: bytes, **changes) -> tuple[bytes, str]:
    plain = {key: value for key, value in tensor(**changes).items() if key != "data"}
    head = json.dumps({"inputs": [{"parameters": {"binary_data_size": len(data)}, **plain}]}).encode()
    return head + data, str(len(head))


FLOATS = np.array([1, 2], "<f4").tobytes()
BAD = {
    "nothing": (b"", None, "not JSON"),
    "no json": (b"\xff\xfe", None, "not JSON"),
    "a list": (b"[]", None, "expected a map with 'inputs'"),
    "no inputs": (b"{}", None, "expected a list of 1 to 64 tensors"),
    "many inputs": (body_of(inputs=[tensor(name=str(i)) for i in range(65)]), None, "1 to 64 tensors"),
    "an input that is no map": (body_of(inputs=[1]), None, "expected maps with a name"),
    "an input without a name": (body_of(inputs=[{"shape": [1]}]), None, "expected maps with a name"),
    "twice": (body_of(inputs=[tensor(), tensor()]), None, "input 'x' comes twice"),
    "another datatype": (body_of(inputs=[tensor(datatype="FP8")]), None, "datatype FP8, expected"),
    "a datatype that is none": (body_of(inputs=[tensor(datatype=["FP32"])]), None, "datatype"),
    "a shape of texts": (body_of(inputs=[tensor(shape=["2"])]), None, "is not a list of at most 8 sizes"),
    "a negative shape": (body_of(inputs=[tensor(shape=[-2])]), None, "is not a list"),
    "a deep shape": (body_of(inputs=[tensor(shape=[1] * 9)]), None, "is not a list"),
    "a huge shape": (body_of(inputs=[tensor(shape=[2**31 - 1] * 8)]), None, "2 elements, shape"),
    "too few numbers": (body_of(inputs=[tensor(data=[1])]), None, "1 elements, shape [2] needs 2"),
    "a text among numbers": (body_of(inputs=[tensor(data=[1, "2"])]), None, "an element is no FP32"),
    "a flag among numbers": (body_of(inputs=[tensor(data=[1, True])]), None, "an element is no FP32"),
    "a null": (body_of(inputs=[tensor(data=[1, None])]), None, "an element is no FP32"),
    "a float for a byte": (body_of(inputs=[tensor(datatype="UINT8", data=[1, 2.5])]), None, "no UINT8"),
    "a number too large": (body_of(inputs=[tensor(datatype="UINT8", data=[1, 256])]), None, "does not fit UINT8"),
    "deep lists": (body_of(inputs=[tensor(data=[[[[[[[[[1]]]]]]]]])]), None, "that have not the shape [2]"),
    "lists of another shape": (body_of(inputs=[tensor(shape=[2, 2], data=[[1, 2, 3], [4]])]), None, "shape [2, 2]"),
    "data that is no list": (body_of(inputs=[tensor(data=1)]), None, "expected a list of numbers or texts"),
    "parameters of a list": (body_of(parameters=[]), None, "'parameters': got a list"),
    "a negative seed": (body_of(parameters={"seed": -1}), None, "parameters.seed"),
    "a step of text": (body_of(parameters={"step": "1"}), None, "parameters.step"),
    "a flag of text": (body_of(parameters={"binary_data_output": "no"}), None, "'binary_data_output': got no"),
    "an id of a number": (body_of(id=3), None, "'id': expected a text"),
    "a length of text": (body_of(), "x", "expected at most the body's"),
    "a length beyond the body": (body_of(), "99999", "expected at most the body's"),
    "bytes left over": (body_of() + b"xx", str(len(body_of())), "2 bytes follow the last tensor"),
    "more bytes than there are": (*binary_of(FLOATS, parameters={"binary_data_size": 9}), "but 8 bytes are left"),
    "a size of text": (*binary_of(FLOATS, parameters={"binary_data_size": "8"}), "binary_data_size 8"),
    "too few bytes": (*binary_of(FLOATS[:4]), "needs 8 bytes, got 4"),
    "a text cut short": (*binary_of(b"\x09\0\0\0ab", datatype="BYTES", shape=[1]), "a text of 9 bytes, of which 2"),
    "a length cut short": (*binary_of(b"\x09\0", datatype="BYTES", shape=[1]), "are not 1 texts"),
    "too few texts": (*binary_of(b"\x01\0\0\0a", datatype="BYTES", shape=[2]), "1 texts, shape [2] needs 2"),
    "too many texts": (*binary_of(b"\0\0\0\0" * 3, datatype="BYTES", shape=[2]), "are not 2 texts"),
    "no utf-8": (*binary_of(b"\x01\0\0\0\xff", datatype="BYTES", shape=[1]), "is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "length", "says"), BAD.values(), ids=BAD)
def test_what_is_no_request_is_refused_by_name(body, length, says):
    with pytest.raises(RequestError) as refusal:
        decode_infer(body, length)
    assert refusal.value.status == 400
    assert says in str(refusal.value)


def test_numbers_in_flat_and_nested_lists_are_the_same_tensor():
    flat, nested = (
        decode_infer(body_of(inputs=[tensor(shape=[2, 2], data=data)]), None).asked.observation["x"]
        for data in ([1, 2, 3, 4.5], [[1, 2], [3, 4.5]])
    )
    np.testing.assert_array_equal(flat, nested)
    assert (flat.dtype, flat.shape) == (np.dtype("float32"), (2, 2))


def test_random_bytes_and_mutated_requests_are_requests_or_refused():
    rng = np.random.default_rng(0)
    good, length = binary_of(FLOATS)
    for _ in range(3000):
        data = bytearray(good)
        for at in rng.integers(0, len(data), rng.integers(1, 6)):
            data[at] = rng.integers(256)
        cut = bytes(data[: rng.integers(len(data) + 1)])
        with contextlib.suppress(RequestError):  # and nothing else
            decode_infer(cut, length if rng.random() < 0.8 else None)


def test_over_http_errors_are_the_protocols_own():
    with service_of(FakeRunner()) as service, TestClient(build_app(service)) as client:
        for path in ("/v2/models/fak", "/v2/models/fak/ready", "/v2/models/fake/versions/7/ready"):
            assert client.get(path).status_code == 404
        answer = client.post(INFER, content=b"{}")
        assert (answer.status_code, set(answer.json())) == (400, {"error"})
        answer = client.post("/v2/models/fake/versions/fake-1/infer", content=orjson.dumps({"inputs": json_inputs()}))
        assert answer.json()["outputs"][0]["shape"] == [4, 2]
        assert HEADER_LENGTH not in answer.headers
        assert 'transport="oip"' in client.get("/metrics").text


def json_inputs():
    kinds = {"float32": "FP32", "uint8": "UINT8", "object": "BYTES"}
    return [
        {"name": name, "datatype": kinds[str(x.dtype)], "shape": list(x.shape), "data": x.tolist()}
        for name, x in window().items()
        if name in CONTRACT.observation
    ]
