"""Jobs without `members` have none of the costs of jobs with them."""

from __future__ import annotations

from cases.memberless import Costs, train_without_members
from harness.ranks import run_ranks

from offbeat import WFBP, LocalSGD


def test_a_job_without_members_sends_no_copies_and_keeps_no_message() -> None:
    """Messages are sent in place, links keep no result, the module of the membership is not
    imported, and no message is exchanged beside those of the plan."""
    for found in run_ranks(2, train_without_members, [LocalSGD(period=2), WFBP()]):
        for costs in found:
            assert costs == Costs(is_staged=False, keeps_last=False, handles_signals=False,
                                  modules=[], control_messages=0, further_messages=0)  # fmt: skip
