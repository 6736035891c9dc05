import importlib
import inspect
import json

import numpy as np
import triton_python_backend_utils as pb_utils

MODULES = ("json", "math", "os.path", "shutil", "textwrap")
SHOWN = 3
BATCH = 64
SAMPLING = json.dumps({"max_tokens": 48, "temperature": 0})


def docstrings():
    """The first paragraph on every public name, by its full name."""
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in dir(module):
            text = (inspect.getdoc(getattr(module, name)) or "").partition("\n\n")[0]
            if text and not name.startswith("_"):
                found[f"{module_name}.{name}"] = f"{module_name}.{name}: {text[:300]}"
    return found


def strings(*values):
    return np.array([value.encode() for value in values], np.object_)


class TritonPythonModel:
    def initialize(self, args):
        self.texts = docstrings()
        self.vectors = None  # other models can be asked from `execute` on

    def embedded(self):
        """The texts' vectors, by the model that embeds the questions, too."""
        texts = list(self.texts.values())
        found = []
        for start in range(0, len(texts), BATCH):
            batch = strings(*texts[start : start + BATCH]).reshape(-1, 1)
            request = pb_utils.InferenceRequest(
                model_name="embed", requested_output_names=["VECTOR"], inputs=[pb_utils.Tensor("TEXT", batch)]
            )
            response = request.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            found.append(np.array(response.output_tensors()[0].as_numpy()))
        return np.concatenate(found)

    def execute(self, requests):
        if self.vectors is None:
            self.vectors = self.embedded()
        responses = []
        for request in requests:
            question = pb_utils.get_input_tensor_by_name(request, "QUESTION").as_numpy()[0].decode(errors="replace")
            vector = pb_utils.get_input_tensor_by_name(request, "VECTOR").as_numpy()
            best = np.argsort(-(self.vectors @ vector), kind="stable")[:SHOWN]
            names = [list(self.texts)[number] for number in best]
            known = "\n".join(self.texts[name] for name in names)
            prompt = f"{known}\n\nQuestion: {question}\nAnswer:"
            tensors = (("PROMPT", strings(prompt)), ("SAMPLING", strings(SAMPLING)), ("SOURCES", strings(*names)))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(*tensor) for tensor in tensors]))
        return responses
