"""`python -m dcpjax.explain`: who owns which token, bytes on a rank, what crosses devices, for a command line of the server.

Takes the flags of `dcpjax.serve` and reads a `config.json`, no weights; `--model` also takes the names that `dcpjax.plan`
knows. The devices need not be there.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from dcpjax import build
from dcpjax.build import EngineConfig
from dcpjax.errors import ConfigError
from dcpjax.explanation import Explanation, explain_plan
from dcpjax.mesh import abstract_plan
from dcpjax.plan import read_subject
from dcpjax.server import arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the explanation; 0, or 2 with one line on standard error if the configuration is refused."""
    parser = argparse.ArgumentParser(prog="dcpjax.explain", description=__doc__, allow_abbrev=False)
    parser.add_argument("--svg", type=pathlib.Path, metavar="FILE", help="write the picture too")
    own, flags = parser.parse_known_args(argv)
    llm = arguments.parse(flags, program="dcpjax.explain").llm
    try:
        found = explain(llm)
        if own.svg is not None:
            own.svg.write_text(found.svg())
    except (ConfigError, OSError) as error:
        print(f"dcpjax.explain: error: {error}", file=sys.stderr)
        return 2
    print(found)
    return 0


def explain(llm: dict[str, Any]) -> Explanation:
    """Of arguments of `LLM`, as `arguments.parse` gives them. Raises `ConfigError`."""
    subject = read_subject(llm["model"], llm["hf_overrides"])
    # How many blocks there are, and how long a sequence may be, change nothing of this.
    config = dataclasses.replace(EngineConfig.read(llm), num_blocks=2, max_model_len=None)
    sizes = config.tensor_parallel_size, config.decode_context_parallel_size, config.expert_parallel
    mesh = abstract_plan(*sizes, platform="cpu")
    return explain_plan(build.resolve(subject.cfg, config, subject.form_of, mesh))


if __name__ == "__main__":
    sys.exit(main())
