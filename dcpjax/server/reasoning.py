"""Parts a thinking model's answer into reasoning and content, while it arrives.

Text before the first `</think>` is reasoning, text after it content; a `<tool_call>` in an unfinished think block ends
it too and belongs to the content. A `<think>` that the model repeats at the very start is dropped. What could still
become one of these is held back, so that the pieces joined never depend on how the text was cut.
"""

from dcpjax.text import Needle

OPEN, CLOSE, CALL = "<think>", "</think>", "<tool_call>"
_TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


def thinking_open(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a think block of the assistant's turn: the first state of `Reasoning`."""
    starts = {prompt.rfind(turn): turn for turn in _TURNS}
    start = max(starts)
    if start < 0 or starts[start] != "<|assistant|>":
        return False
    turn = prompt[start:]
    return turn.rfind(OPEN) > turn.rfind(CLOSE)


class Reasoning:
    """`push` and `finish` return the next pieces of (reasoning, content)."""

    def __init__(self, thinking: bool):
        self.thinking = thinking
        self._needles = (Needle(CLOSE), Needle(CALL))
        self._start = thinking  # a repeated opening tag may still come
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """More text came."""
        if not self.thinking:
            return "", text
        if not (self._held or self._start or "<" in text):
            return text, ""
        if self._start:
            text = self._held + text
            if len(text) < len(OPEN) and OPEN.startswith(text):
                self._held = text
                return "", ""
            self._start, self._held = False, ""
            text = text.removeprefix(OPEN)
        ends = [(end, needle.text) for needle in self._needles if (end := needle.scan(text)) is not None]
        whole = self._held + text
        if ends:
            end, tag = min(ends)
            end += len(self._held)
            self.thinking, self._held = False, ""
            return whole[: end - len(tag)], whole[end:] if tag == CLOSE else whole[end - len(tag) :]
        keep = len(whole) - max(needle.matched for needle in self._needles)
        self._held = whole[keep:]
        return whole[:keep], ""

    def finish(self) -> tuple[str, str]:
        """No more will come: what was held back."""
        held, self._held = self._held, ""
        return held, ""
