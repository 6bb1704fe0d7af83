"""A conversation that is longer than its context: somebody names guests, one at a time, and asks for all of
them at the end. What a summary leaves out is lost.
"""

from typing import Any

from springtide import Conversation, Summaries

#: Three guests fit. With five of them, the question needs a third context.
CONTEXT_TOKENS = 35
INSTRUCTION = "Summary"
ANSWER_TOKENS_MAX = 24


def play(client: Any, model: str, task: dict, summaries: Summaries = "trained") -> str:
    """What the model answered to the last message, the question."""
    conversation = Conversation(
        client,
        model,
        context_tokens=CONTEXT_TOKENS,
        summaries=summaries,
        instruction=INSTRUCTION,
        max_tokens=ANSWER_TOKENS_MAX,
    )
    answers = [conversation.say(line).content or "" for line in task["prompt"].splitlines()]
    return answers[-1]
