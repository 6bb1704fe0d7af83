"""Both clients against a running stack, for `tests/learning/spine.rs`. Prints what they sent, as JSON."""

import asyncio
import json

import springtide
from springtide import AsyncClient, Choice, Client

PROMPT = "fn main() {\n    let mut map = HashMap::<|cut|>"


def last(chunks: list[springtide.Chunk]) -> Choice:
    choice = chunks[-1].choice
    assert choice is not None and choice.text == "".join(chunk.text for chunk in chunks)
    return choice


def blocking() -> tuple[list[Choice], list[str]]:
    with Client(model="demo") as client:
        whole = client.complete(PROMPT, user="ada", max_tokens=6).choices[0]
        streamed = last(list(client.stream_complete(PROMPT, user="bob", max_tokens=6)))
        for choice in (whole, streamed):
            assert choice.generation_id is not None and choice.root is not None and len(choice.root) == 64
            assert choice.version is not None and choice.arm and choice.finish_reason in ("stop", "length")
        name = springtide.uuid7()
        given = client.feedback(whole, "accept", True, feedback_id=name, tags={"place": "editor"})
        assert given.feedback_id == name
        # another body under a new id would count twice; a dry run writes nothing
        assert client.feedback(whole, "accept", False, dryrun=True).dryrun is not None
        by_token = client.feedback(streamed, "accept", True, token=streamed.feedback_token)
        client.retract(by_token.feedback_id, "by mistake")
        client.end_episode(whole.generation_id or "")
        try:
            client.complete("x", model="demo@999999")
        except springtide.NotFoundError as refused:
            assert refused.type == "not-found" and refused.detail
        else:
            raise AssertionError("a version that does not exist has answered")
        try:
            client.feedback(whole, "", True)
        except springtide.RequestError as refused:
            assert refused.field == "metric_name", refused.document
        else:
            raise AssertionError("a metric without a name was accepted")
        return [whole, streamed], [str(name), str(by_token.feedback_id)]


async def concurrent() -> tuple[list[Choice], list[str]]:
    async with AsyncClient(model="demo") as client:

        async def one(user: str) -> tuple[Choice, str]:
            choice = last([chunk async for chunk in client.stream_complete(PROMPT, user=user, max_tokens=6)])
            return choice, str((await client.feedback(choice, "accept", True)).feedback_id)

        made = await asyncio.gather(*(one(f"user-{number}") for number in range(4)))
        return [choice for choice, _ in made], [feedback for _, feedback in made]


def main() -> None:
    choices, feedback = blocking()
    more_choices, more_feedback = asyncio.run(concurrent())
    generations = [str(choice.generation_id) for choice in choices + more_choices]
    print(json.dumps({"generations": generations, "feedback": feedback + more_feedback}))


main()
