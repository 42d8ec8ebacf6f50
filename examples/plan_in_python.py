"""Plan, check and train from Python: in a notebook, every result is a table with pictures.

python examples/plan_in_python.py
"""

import sys

import meshwright


def main(directory: str = "runs/from-python") -> None:
    planned = meshwright.plan("llama-3.1-8b", on="h100:8x2", tokens="300B", pins={"recompute": "none"})
    print(planned)  # in a notebook, `planned` alone draws the layouts, the memory and the reasons
    for reason in planned.why:
        print("-", reason)

    smaller = ["data.microbatch_sequences=1", "memory.recompute=full"]
    predicted = meshwright.predict(planned, on="h100:8x2", overrides=smaller)
    print(f"{predicted.step_seconds:.1f} s per step, fits: {predicted.fits}")

    short = ["parallel.dp_replicate=1", "schedule.num_steps=20", "schedule.warmup_steps=2"]
    checked = meshwright.check("demo", overrides=short)
    trained = meshwright.train("demo", directory=directory, overrides=short, quiet=True)
    print(f"valid: {checked.is_valid}; loss {trained.loss:.3f} after {len(trained.history)} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
