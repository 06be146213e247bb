"""A training loop on the tinker SDK, run by ``test_tinker_clients`` in an environment with it.

``sdk_program.py URL KEY`` uses the whole API, and prints what it checked as JSON. With batches and
parameters of AdamW as a third argument it makes these steps, and prints their losses and the path
of the weights before them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
from tinker import types

try:
    # It lets its keys pass the SDK, which knows its own alone.
    import mint
except ImportError:
    mint, PREFIX = None, "tml-"
else:
    PREFIX = "sk-"

TEXT = list(b"the quick brown fox jumps over the lazy dog")


def datum(text: list[int], **inputs: list[float]) -> Any:
    count = len(text) - 1
    inputs.setdefault("weights", [1.0] * count)
    if len(inputs) > 1:
        del inputs["weights"]
    tensors = {
        name: types.TensorData(data=values, dtype="float32", shape=[count])
        for name, values in inputs.items()
    }
    targets = types.TensorData(data=text[1:], dtype="int64", shape=[count])
    return types.Datum(
        model_input=types.ModelInput.from_ints(text[:-1]),
        loss_fn_inputs={"target_tokens": targets, **tensors},
    )


def main(url: str, key: str, steps: str | None = None) -> dict[str, Any]:
    service = tinker.ServiceClient(base_url=url, api_key=PREFIX + key)
    return use_api(service) if steps is None else train(service, **json.loads(steps))


def train(service: Any, batches: list[list[list[int]]], adam: dict[str, float]) -> dict[str, Any]:
    """Make a step of each batch."""
    base = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=base, rank=8)
    start = training.save_weights_for_sampler("start").result().path
    passes = []
    for batch in batches:
        data = [datum(text) for text in batch]
        passes.append(training.forward_backward(data, "cross_entropy"))
        training.optim_step(types.AdamParams(**adam))
    losses = [each.result().metrics["loss:sum"] for each in passes]
    return {"losses": losses, "start": start}


def use_api(service: Any) -> dict[str, Any]:
    """Use everything once."""
    names = [model.model_name for model in service.get_server_capabilities().supported_models]
    training = service.create_lora_training_client(base_model=names[0], rank=8, seed=1)
    assert training.get_info().model_data.model_name == names[0]
    losses = []
    for _ in range(8):
        passed = training.forward_backward([datum(TEXT), datum(TEXT[5:])], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    assert losses[-1] < losses[0] / 2, losses

    # More data than one call carries arrive as chunks.
    many = training.forward([datum(TEXT[:6])] * 1030, "cross_entropy").result()
    assert len(many.loss_fn_outputs) == 1030

    state = training.save_state("state").result().path
    saved = training.save_weights_for_sampler("served").result().path
    prompt = types.ModelInput.from_ints(TEXT[:8])
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    clients = [
        service.create_sampling_client(model_path=saved),
        training.save_weights_and_get_sampling_client(),
        service.create_sampling_client(base_model=names[0]),
    ]
    samples = [
        client.sample(prompt, num_samples=2, sampling_params=params).result().sequences
        for client in clients
    ]
    tokens = [[list(each.tokens) for each in sequences] for sequences in samples]
    assert tokens[0] == tokens[1] != tokens[2]
    assert all(len(each.tokens) == len(each.logprobs) for each in samples[0])

    # One step of reinforcement learning, and the log-probs agree with those of the samples.
    sequence = samples[0][0]
    whole = TEXT[:8] + list(sequence.tokens)
    behind = [0.0] * 7
    rl = datum(
        whole,
        logprobs=behind + list(sequence.logprobs),
        advantages=behind + [1.0] * len(sequence.tokens),
    )
    output = training.forward_backward([rl], "importance_sampling").result()
    ours = output.loss_fn_outputs[0]["logprobs"].data[7:]
    worst = max(abs(a - b) for a, b in zip(ours, sequence.logprobs, strict=True))
    assert worst < 0.2, worst
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    computed = clients[0].compute_logprobs(prompt).result()
    assert computed[0] is None
    assert len(computed) == 8

    top = (
        clients[0]
        .sample(
            prompt,
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=1, top_k=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        )
        .result()
    )
    assert top.topk_prompt_logprobs[0] is None
    for token, own, row in zip(TEXT[1:8], computed[1:], top.topk_prompt_logprobs[1:], strict=True):
        assert len(row) == 3
        assert dict(row).get(token, own) == own or abs(dict(row)[token] - own) < 1e-3

    # Several targets at each place, as distillation sends them.
    several = types.Datum(
        model_input=types.ModelInput.from_ints(TEXT[:3]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=TEXT[:6], dtype="int64", shape=[3, 2]),
            "weights": types.TensorData(data=[0.5] * 6, dtype="float32", shape=[3, 2]),
        },
    )
    spread = training.forward([several, datum(TEXT)], "cross_entropy").result()
    assert [list(each["logprobs"].shape) for each in spread.loss_fn_outputs] == [
        [3, 2],
        [len(TEXT) - 1],
    ]

    again = service.create_training_client_from_state(state)
    restored = again.forward([datum(TEXT), datum(TEXT[5:])], "cross_entropy").result()
    assert restored.metrics["loss:sum"] < losses[-1]

    rest = service.create_rest_client()
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {"weights/state", "sampler_weights/served"} <= {each.checkpoint_id for each in listed}
    problem = ""
    try:
        training.forward_backward([datum([1, 2, 10**6])], "cross_entropy").result()
    except tinker.TinkerError as error:
        problem = str(error)
    assert "outside of" in problem

    checked = ["cross_entropy", "chunks", "save", "load", "sample", "importance_sampling", "rest"]
    try:
        import torch
    except ImportError:
        pass
    else:

        def squares(data: Any, logprobs: list[Any]) -> Any:
            loss = torch.stack([each.square().sum() for each in logprobs]).sum()
            return loss, {"squares:sum": float(loss)}

        custom = training.forward_backward_custom([datum(TEXT)], squares).result()
        assert custom.metrics["squares:sum"] > 0
        checked.append("custom")
    if mint is not None:
        mixed = mint.mint.interpolate_checkpoints(
            service, source_paths=[saved, saved], coefficients=[0.5, 0.5]
        )
        same = service.create_sampling_client(model_path=mixed.path)
        again_sampled = same.sample(prompt, num_samples=2, sampling_params=params).result()
        assert [list(each.tokens) for each in again_sampled.sequences] == tokens[0]
        checked.append("interpolate")
        other = mint.mint.forward_backward_reverse_kl(
            training,
            reference_model_path=state,
            data=[
                mint.mint.ReverseKLDatum(
                    student_input=prompt,
                    reference_input=types.ModelInput.from_ints(TEXT[:12]),
                    target_tokens=types.TensorData(data=TEXT[12:20], dtype="int64", shape=[8]),
                    weights=types.TensorData(data=[1.0] * 8, dtype="float32", shape=[8]),
                )
            ],
            temperature=0.5,
        )
        assert len(other.outputs) == 1
        assert other.metrics["reverse_kl:mean"] > 0
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        checked.append("reverse_kl")
    return {"version": tinker.__version__, "checked": checked}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201
