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


class DuelConfig(vf.EnvConfig):
    white: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    black: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    umpire: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    rounds: int = 1


class Duel(vf.Env[DuelConfig]):
    """Two seats that learn, one of which loses what the other wins, and one that is frozen."""

    async def setup(self, agents):
        agents.umpire.trainable = False

    async def run(self, task, agents):
        for _ in range(self.config.rounds):
            await agents.white.run(task)
        await agents.black.run(task)
        await agents.umpire.run(task)

    async def finalize(self, task, episode):
        won = {"white": 1.0, "black": -1.0, "umpire": 9.0}
        for number, trace in enumerate(episode.traces):
            trace.rewards.clear()
            trace.record_reward("won", won[trace.agent.name] + (0.5 if self.config.rounds > 1 and number == 0 else 0.0))


__all__ = ["Once", "Sums"]
