"""The real command over a `FakeLLM`, whose arguments come through --hf-overrides."""

import sys

from dcpjax import serve
from tests.server.fake_llm import FakeLLM

if __name__ == "__main__":
    sys.exit(serve.main(make_llm=lambda arguments: FakeLLM(**(arguments["hf_overrides"] or {}))))
