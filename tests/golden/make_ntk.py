"""Makes `ntk.json`: NNGP and NTK matrices computed by neural-tangents, to judge `onefold.kernels.infinite`.

neural-tangents 0.6.5 does not import on current jax, so this runs in an environment of its own, never in ours:

    python3.11 -m venv /tmp/nt
    /tmp/nt/bin/pip install "jax==0.4.35" "jaxlib==0.4.35" "numpy<2" neural-tangents==0.6.5
    /tmp/nt/bin/python tests/golden/make_ntk.py
"""

import json
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)

from neural_tangents import stax  # noqa: E402  (float64 must be switched on before the first array is made)

CASES = [
    {"activation": activation, "hidden_layers": hidden_layers, "w_std": w_std, "b_std": b_std}
    for activation in ("relu", "erf")
    for hidden_layers in (0, 1, 2, 4)
    for w_std, b_std in ((1.0, 0.0), (1.5, 0.3))
]


def kernels(case: dict, x1: np.ndarray, x2: np.ndarray) -> dict[str, list]:
    activation = {"relu": stax.Relu, "erf": stax.Erf}[case["activation"]]
    layers = []
    for _ in range(case["hidden_layers"]):
        layers += [stax.Dense(64, case["w_std"], case["b_std"]), activation()]
    layers.append(stax.Dense(1, case["w_std"], case["b_std"]))
    _, _, kernel_fn = stax.serial(*layers)
    result = kernel_fn(x1, x2, ("nngp", "ntk"))
    return {"nngp": np.asarray(result.nngp).tolist(), "ntk": np.asarray(result.ntk).tolist()}


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    x1 = rng.normal(size=(5, 3))
    x2 = np.concatenate([x1[:2], -x1[:1], 1e-3 * x1[2:3], rng.normal(size=(3, 3))])  # equal, opposite and tiny points
    golden = {
        "made_by": "neural-tangents 0.6.5, jax 0.4.35, float64",
        "x1": x1.tolist(),
        "x2": x2.tolist(),
        "cases": [case | kernels(case, x1, x2) for case in CASES],
    }
    Path(__file__).with_name("ntk.json").write_text(json.dumps(golden) + "\n")
