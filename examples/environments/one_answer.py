"""A harness of `verifiers` that asks once, without a process of its own. Nothing here knows of
Springtide."""

import verifiers.v1 as vf
from openai import AsyncOpenAI


class OneAnswerConfig(vf.HarnessConfig):
    pass


class OneAnswer(vf.Harness[OneAnswerConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(
                model=ctx.model, messages=[*messages, {"role": "user", "content": prompt}]
            )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["OneAnswer"]
