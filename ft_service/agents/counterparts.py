"""What a job's environment names, as what its rollouts are run with."""

from __future__ import annotations

from ft_service.agents.addresses import Access
from ft_service.agents.endpoint import AgentEndpoint
from ft_service.agents.mcp_tools import mcp_servers
from ft_service.agents.open_env import open_envs
from ft_service.agents.open_rollouts import OpenRollouts
from ft_service.agents.playing import Playing
from ft_service.agents.running import Counterpart
from ft_service.serving.token_sampler import Sampler
from ft_service.spec.environments import EndpointEnvironment, Environment, McpEnvironment


def counterpart_of(
    environment: Environment,
    access: Access,
    *,
    model: str,
    sampler: Sampler,
    opened: OpenRollouts,
    has_grader: bool,
) -> Counterpart:
    """`model`: name of the base. `opened`: where agents call it. `has_grader`: the job has one."""
    if isinstance(environment, EndpointEnvironment):
        return AgentEndpoint(options=environment, access=access, model=model, opened=opened)
    connects = mcp_servers if isinstance(environment, McpEnvironment) else open_envs
    return Playing(
        options=environment,
        access=access,
        sampler=sampler,
        connects=connects,
        has_grader=has_grader,
    )
