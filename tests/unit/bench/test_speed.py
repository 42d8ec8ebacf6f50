"""The page of speed names every result, ours first."""

from bench.speed import page


def _summary(**rates: float) -> dict:
    rows = [
        {"kind": "round", "label": label, "settings": {}, "device": "NVIDIA H200", "teraflops": rate,
         "tokens_per_second": 1.0, "step_seconds": 1.0, "p10_seconds": 1.0, "p90_seconds": 1.0}
        for label, rate in rates.items()
    ]  # fmt: skip
    run = {
        "model": {"family": "llama-3.2-1b", "num_layers": 16},
        "precision": {"weights": "fp32"},
        "data": {"sequence_length": 4096, "microbatch_sequences": 8},
    }
    return {"options": {"precision": "bf16"}, "run": run, "rows": rows, "first_losses_agree": True}


def test_a_row_compares_with_the_fastest_peer() -> None:
    text = page({"step_1b": _summary(hf=400.0, ours=500.0, plain=450.0)})
    assert "| case | device | ours | hf | plain | ours over the fastest peer |" in text
    assert "| NVIDIA H200 | 500 | 400 | 450 | 1.11x |" in text
    assert "llama-3.2-1b, 16 layers, bf16, weights fp32, 8 x 4096, joined documents" in text


def test_a_run_of_ours_alone_has_no_ratio() -> None:
    assert "| 500 | - |" in page({"step_1b": _summary(ours=500.0), "ladder_1b": _summary(ours=1.0)})
    assert "Not measured yet" in page({})


def test_a_comparison_of_different_models_counts_for_nothing() -> None:
    unsound = {**_summary(ours=500.0, hf=1.0), "first_losses_agree": False}
    assert "Not measured yet" in page({"step_1b": unsound})
