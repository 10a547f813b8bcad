"""dcpjax: a JAX inference engine for GLM-5.2 with decode context parallelism.

`from dcpjax import LLM, SamplingParams`. Names are resolved on first use, so that importing the package starts nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcpjax.explanation import explain_plan
    from dcpjax.host.request import SamplingParams
    from dcpjax.llm import LLM, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__", "explain_plan"]


def __getattr__(name: str) -> Any:
    if name == "SamplingParams":
        from dcpjax.host.request import SamplingParams

        return SamplingParams
    if name in ("LLM", "RequestOutput"):
        from dcpjax import llm

        return getattr(llm, name)
    if name == "explain_plan":
        from dcpjax.explanation import explain_plan

        return explain_plan
    raise AttributeError(f"module 'dcpjax' has no attribute {name!r}")
