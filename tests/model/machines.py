"""How the state machines of this folder are run: short walks in every run, long ones with --long."""

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

_ROUNDS = int(os.environ.get("TIERFS_MODEL_EXAMPLES", "300"))


def run_short(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """The same walks each time; one that fails is printed step by step, and not made shorter: that takes minutes."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            _all,
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
        ),  # fmt: skip
    )


def run_long(machine: type[RuleBasedStateMachine], *, steps: int) -> None:
    """Walks of another seed each time (TIERFS_MODEL_EXAMPLES says how many); one that fails is printed, and how to
    repeat it.
    """
    run_state_machine_as_test(
        machine, settings=settings(_all, max_examples=_ROUNDS, stateful_step_count=steps, print_blob=True)
    )


# Real disks and threads take as long as they take.
_all = settings(deadline=None, suppress_health_check=list(HealthCheck))
