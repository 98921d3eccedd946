"""Put a trained vision tower into the bundled demo checkpoint, and measure it there.

    python tools/package_demo_tower.py --run RUN --package checkpoints/demo-d3 [--pictures 1000]

Measured is the engine, on drawings that nothing was learnt from: half of pairs of shape and colour that were learnt
from, half of the pairs that were held out. The model card gets a part about pictures.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from demo.picture_exam import Answered, report, sit
from demo.tower_package import write_card, write_tower
from safetensors.torch import load_file

from d3serve.model.engine import DecisionEngine

SEED = 4_112_026


def main() -> None:
    """Write, measure, describe."""
    parser = argparse.ArgumentParser(description="Give the bundled demo checkpoint a trained vision tower.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=1000)
    options = parser.parse_args()
    write_tower(options.package, load_file(options.run / "tower.safetensors"), options.package)
    engine = DecisionEngine.load(str(options.package))
    answered: dict[str, list[Answered]] = {}
    for group, held_out in (("pairs learnt from", False), ("pairs held out", True)):
        rng = np.random.default_rng([SEED, held_out])
        answered[group] = sit(engine, rng, options.pictures // 2, held_out=held_out)
    results = report(answered)
    (options.run / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    write_card(options.package, results)


if __name__ == "__main__":
    main()
