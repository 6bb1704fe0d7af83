"""A small environment of `verifiers`, with a harness that needs no process. For `against_verifiers`."""

# mypy: ignore-errors

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    size: int = 3


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for n in range(self.config.size):
            yield Sum(SumData(prompt=f"2 + {n} =", answer=str(2 + n)), self.config.task)


class OnceConfig(vf.HarnessConfig):
    pass


class Once(vf.Harness[OnceConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Once", "Sums"]
