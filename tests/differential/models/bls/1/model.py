import asyncio
import json
import types

import numpy as np
import triton_python_backend_utils as pb_utils


def text(value):
    value = list(value) if isinstance(value, types.GeneratorType) else value
    return np.array([str(value).encode()], dtype=np.object_)


def add(model="add_sub", outputs=("OUTPUT0",), **options):
    inputs = [pb_utils.Tensor(name, np.arange(4, dtype=np.float32)) for name in ("INPUT0", "INPUT1")]
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=list(outputs), inputs=inputs, **options)


def repeat(n, fail_at=-1):
    inputs = [pb_utils.Tensor(k, np.array([v], dtype=np.int32)) for k, v in (("N", n), ("FAIL_AT", fail_at))]
    return pb_utils.InferenceRequest(model_name="repeat", requested_output_names=["INDEX"], inputs=inputs)


START, END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END


def step(id, value, flags):
    inputs = [pb_utils.Tensor("INPUT", np.array([[value]], dtype=np.int32))]
    about = {"model_name": "sequence_direct", "requested_output_names": ["SUM"]}
    return pb_utils.InferenceRequest(inputs=inputs, correlation_id=id, flags=flags, **about)


CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")


def show(response):
    if response.has_error():
        error = response.error()
        code = next(name for name in CODES if getattr(pb_utils.TritonError, name) == error.code())
        return f"error {code} {error.message()}"
    return [(t.name(), t.as_numpy().tolist()) for t in response.output_tensors()]


def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__


def asks(**changes):
    good = {"model_name": "add_sub", "inputs": [], "requested_output_names": ["OUTPUT0"]}
    return lambda: pb_utils.InferenceRequest(**{k: v for k, v in {**good, **changes}.items() if v is not ...})


REFUSED = {
    **{f"{name} left out": asks(**{name: ...}) for name in ("model_name", "inputs", "requested_output_names")},
    **{f"{name} None": asks(**{name: None}) for name in ("model_name", "inputs", "requested_output_names")},
    **{f"{name} None": asks(**{name: None}) for name in ("request_id", "correlation_id", "model_version", "flags")},
    **{f"{name} None": asks(**{name: None}) for name in ("timeout", "preferred_memory", "trace")},
    "an input None": asks(inputs=[None]),
    "an input that is none": asks(inputs=[1]),
    "inputs once": lambda: asks(inputs=iter([]))(),
    "outputs one text": asks(requested_output_names="OUTPUT0"),
    "outputs a set": asks(requested_output_names={"OUTPUT0"}),
    "an output None": asks(requested_output_names=[None]),
    "an output empty": asks(requested_output_names=[""]),
    "a tuple of outputs": asks(requested_output_names=("OUTPUT0", b"OUTPUT1")),
    "correlation id a float": asks(correlation_id=1.5),
    "version a text": asks(model_version="1"),
    "flags negative": asks(flags=-1),
    "parameters a list": asks(parameters=[]),
    "a parameter's name bytes": asks(parameters={b"a": 1}),
    "a parameter's value bytes": asks(parameters={"a": b"1"}),
    "response of None": lambda: pb_utils.InferenceResponse([None]),
    "response None": lambda: pb_utils.InferenceResponse(None),
    "response of other": lambda: pb_utils.InferenceResponse([1]),
    "response with text": lambda: pb_utils.InferenceResponse(error="why"),
    "error None": lambda: pb_utils.TritonError(None),
    "error of an exception": lambda: pb_utils.TritonError(ValueError("why")),
    "error with a number": lambda: pb_utils.TritonError("why", 3),
    "tensor's name None": lambda: pb_utils.Tensor(None, np.ones(1)),
    "tensor's name empty": lambda: pb_utils.Tensor("", np.ones(1)),
    "tensor of None": lambda: pb_utils.Tensor("A", None),
    "tensor of nothing": lambda: pb_utils.Tensor("", None),
    "tensor of a list": lambda: pb_utils.Tensor("A", [1.0]),
    "dlpack of None": lambda: pb_utils.Tensor.from_dlpack("A", None),
    "log level None": lambda: pb_utils.Logger.log("x", None),
    "log level a number": lambda: pb_utils.Logger.log("x", 1),
    "log None": lambda: pb_utils.Logger.log(None),
    "log_info of a number": lambda: pb_utils.Logger.log_info(3),
    "log_warn of None": lambda: pb_utils.Logger.log_warn(None),
    "memory a number": lambda: pb_utils.PreferredMemory(1),
    "ready None": lambda: pb_utils.is_model_ready(None),
    "ready, a number": lambda: pb_utils.is_model_ready("add_sub", 1),
    "load None": lambda: pb_utils.load_model(None),
    "load, no configuration": lambda: pb_utils.load_model("add_sub", config=None),
    "load, files in a list": lambda: pb_utils.load_model("add_sub", files=[1]),
    "unload None": lambda: pb_utils.unload_model(None),
    "family of None": lambda: pb_utils.MetricFamily(None, "d", pb_utils.MetricFamily.GAUGE),
    "family, a number": lambda: pb_utils.MetricFamily("a", "d", 0),
}


class TritonPythonModel:
    """Calls other models as WHAT says, and shows what came of it."""

    def initialize(self, args):
        self.args = args
        kinds = {"counted": pb_utils.MetricFamily.COUNTER, "gauged": pb_utils.MetricFamily.GAUGE}
        # They stay: Triton 2.51 may crash when a family is deleted while it runs.
        self.families = [
            pb_utils.MetricFamily(name=f"differential_{name}", description="of a test", kind=kind)
            for name, kind in kinds.items()
        ]
        self.metric = [family.Metric(labels={"what": "x", "model": "bls"}) for family in self.families]
        # without metrics, known already with another text, without buckets
        more = {"lonely": "GAUGE", "counted": "COUNTER", "sized": "HISTOGRAM"}
        self.families += [
            pb_utils.MetricFamily(
                name=f"differential_{name}", description="told later", kind=getattr(pb_utils.MetricFamily, kind)
            )
            for name, kind in more.items()
        ]
        self.sizes = self.families[-1].Metric(labels={}, buckets=[])
        self.sizes.observe(3.5)

    def execute(self, requests):
        names = [pb_utils.get_input_tensor_by_name(r, "WHAT").as_numpy()[0].decode() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", text(getattr(self, n)()))]) for n in names]

    def plain(self):
        return show(add(outputs=("OUTPUT1", "OUTPUT0")).exec())

    def version(self):
        return show(add(model_version=1).exec())

    def ensemble(self):
        inputs = [pb_utils.Tensor(name, np.arange(4, dtype=np.float32)) for name in "AB"]
        request = pb_utils.InferenceRequest(model_name="ensemble", requested_output_names=["TWICE_A"], inputs=inputs)
        return show(request.exec())

    def unknown(self):
        return show(add("nowhere").exec())

    def unknown_version(self):
        return show(add(model_version=7).exec())

    def wrong(self):
        return show(add("strings").exec())

    def failing(self):
        request = pb_utils.InferenceRequest(
            model_name="errors",
            requested_output_names=["OUTPUT0"],
            inputs=[pb_utils.Tensor("CODE", np.array([[b"NOT_FOUND"]], dtype=np.object_))],
        )
        return show(request.exec())

    def concurrent(self):
        async def both():
            return await asyncio.gather(add().async_exec(), add(outputs=("OUTPUT1",)).async_exec())

        return [show(response) for response in asyncio.run(both())]

    def told(self):
        about = {"request_id": "7", "correlation_id": 9, "flags": 3, "timeout": 0}
        request = pb_utils.InferenceRequest(
            model_name="echo",
            requested_output_names=["SEEN"],
            inputs=[],
            parameters={"b": True, "i": -3, "s": "x"},
            **about,
        )
        return show(request.exec())

    def sequence(self):
        return [show(step(77, value, flags).exec()) for value, flags in ((1, START), (2, 0), (3, END))]

    def cached(self):
        row = pb_utils.Tensor("INPUT0", np.array([[77]], dtype=np.int32))
        request = {"model_name": "cached", "requested_output_names": ["OUTPUT0"], "inputs": [row]}
        return [show(pb_utils.InferenceRequest(**request).exec()) for _ in range(2)]

    def bytes_names(self):
        names = np.array([b"add_sub", b"OUTPUT0", b"INPUT0", b"INPUT1"], dtype=np.object_)
        inputs = [pb_utils.Tensor(name, np.arange(4, dtype=np.float32)) for name in names[2:]]
        request = pb_utils.InferenceRequest(
            model_name=names[0], requested_output_names=[names[1]], inputs=inputs, request_id=b"7"
        )
        ready = pb_utils.is_model_ready(names[0]), pb_utils.is_model_ready(names[0], b"1")
        error = pb_utils.TritonError(b"why").message()
        return request.request_id(), request.requested_output_names(), show(request.exec()), ready, error

    def again(self):
        responses = repeat(3).exec(decoupled=True)
        return [[show(response) for response in responses] for _ in range(3)]

    def resumed(self):
        responses = repeat(3).exec(decoupled=True)
        found = [show(next(responses))]
        return found, [show(response) for response in responses], [show(response) for response in responses]

    def next(self):
        responses = repeat(1).exec(decoupled=True)
        found = [show(next(responses)) for _ in range(2)]
        found += [next(responses, "end") for _ in range(2)]
        return found, show(next(iter(responses))), iter(responses) is responses

    def plain_again(self):
        responses = add().exec(decoupled=True)
        return [[show(response) for response in responses] for _ in range(2)]

    def unknown_again(self):
        responses = add("nowhere").exec(decoupled=True)
        return [[show(response).split(" ", 2)[0] for response in responses] for _ in range(2)]

    def awaited(self):
        async def one(n):
            return [show(response) for response in await repeat(n).async_exec(decoupled=True)]

        async def all():
            return await asyncio.gather(one(2), one(0), one(1))

        return asyncio.run(all())

    def given_up(self):
        async def wait():
            ensemble = {"model_name": "ensemble_late", "requested_output_names": ["NUMBER"]}
            inputs = [pb_utils.Tensor("N", np.array([1], dtype=np.int32))]
            request = pb_utils.InferenceRequest(inputs=inputs, **ensemble)
            try:
                await asyncio.wait_for(request.async_exec(decoupled=True), 0.01)
            except TimeoutError:
                return "given up"

        return asyncio.run(wait())

    def refusals(self):
        return {what: raised(call) for what, call in REFUSED.items()}

    def decoupled(self):
        return [show(response) for response in repeat(3).exec(decoupled=True)]

    def decoupled_none(self):
        return [show(response) for response in repeat(0).exec(decoupled=True)]

    def decoupled_ensemble(self):
        request = {"model_name": "ensemble_stream", "requested_output_names": ["NUMBER"]}
        inputs = [pb_utils.Tensor("N", np.array([3], dtype=np.int32))]
        responses = pb_utils.InferenceRequest(inputs=inputs, **request).exec(decoupled=True)
        return [found for found in map(show, responses) if found]

    def decoupled_failing(self):
        return [show(response) for response in repeat(3, 1).exec(decoupled=True)]

    def decoupled_unary(self):
        try:
            return show(repeat(1).exec())
        except pb_utils.TritonModelException as error:
            return f"raised {error}"

    def ready(self):
        return [pb_utils.is_model_ready(name) for name in ("add_sub", "nowhere")]

    def arguments(self):
        return {
            key: value for key, value in sorted(self.args.items()) if key not in ("model_config", "model_repository")
        }

    def config(self):
        return json.dumps(json.loads(self.args["model_config"]), sort_keys=True)

    def helpers(self):
        config = json.loads(self.args["model_config"])
        values = np.array([b"a", "b\u00e9".encode(), b""], dtype=np.object_)
        return [
            str(pb_utils.triton_to_numpy_type(7)),
            pb_utils.numpy_to_triton_type(np.float32),
            str(pb_utils.triton_string_to_numpy("TYPE_INT16")),
            sorted(pb_utils.get_input_config_by_name(config, "WHAT").items()),
            sorted(pb_utils.get_output_config_by_name(config, "OUTPUT0").items()),
            pb_utils.get_input_config_by_name(config, "NOPE"),
            pb_utils.using_decoupled_model_transaction_policy(config),
            pb_utils.serialize_byte_tensor(values),
            pb_utils.deserialize_bytes_tensor(pb_utils.serialize_byte_tensor(values)).tolist(),
        ]

    def metrics(self):
        # What they refuse is not tried: Triton 2.51 may crash then.
        counted, gauged = self.metric
        counted.increment(1.5)
        gauged.set(7)
        gauged.increment(-1)
        return [counted.value(), gauged.value()]

    def tensors(self):
        tensor = pb_utils.Tensor("A", np.arange(6, dtype=np.int16).reshape(2, 3))
        copy = pb_utils.Tensor.from_dlpack("B", tensor.to_dlpack())
        for one in (tensor, copy):
            yield one.name(), list(one.shape()), one.is_cpu(), one.as_numpy().tolist()
        error = pb_utils.TritonError("text", pb_utils.TritonError.UNAVAILABLE)
        yield error.message(), error.code() == pb_utils.TritonError.UNAVAILABLE
        yield pb_utils.InferenceResponse([], error).has_error(), pb_utils.InferenceResponse([tensor]).has_error()
        for logged in ("log_info", "log_warn", "log_error", "log_verbose"):
            getattr(pb_utils.Logger, logged)("from the model")
