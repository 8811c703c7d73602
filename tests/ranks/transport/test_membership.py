"""Ranks of another run, and whoever else reaches the launcher's store, are named before anything is compared."""

from concurrent.futures import ThreadPoolExecutor

import ranks
from thread_control import thread_controls

from spmd_worker.base.errors import RanksDisagreeError
from spmd_worker.ranks.transport.membership import check_members, run_secret

ONE, OTHER = run_secret({"TORCHELASTIC_RUN_ID": "one"}), run_secret({"TORCHELASTIC_RUN_ID": "other"})


def said(secrets: list[bytes], change=lambda control: control) -> list[str | None]:
    """What each rank raises."""

    def take_part(control, secret):
        try:
            check_members(control, secret)
        except RanksDisagreeError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(take_part, map(change, thread_controls(len(secrets))), secrets))


def test_ranks_of_one_run_pass_membership_check():
    """A rank alone asks no other."""
    assert said([ONE] * 4) == [None] * 4
    assert said([OTHER]) == [None]


def test_run_name_is_shared_by_its_ranks():
    def names(size: int) -> list[str]:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(check_members, thread_controls(size), [ONE] * size))

    runs = [names(3), names(3), names(1)]
    assert [len(set(each)) for each in runs] == [1, 1, 1]
    assert len({each[0] for each in runs}) == 3


def test_rank_of_another_run_is_named_by_others():
    first, second, stranger = said([ONE, ONE, OTHER])
    assert first == (
        "rank 2 does not belong to the run of rank 0: TORCHELASTIC_RUN_ID or SPMD_WORKER_SECRET is another there, so "
        "another run, or somebody else, has come to the same MASTER_ADDR and MASTER_PORT; give each run a port and an "
        "id (torchrun --rdzv-id) of its own, and every rank the same"
    )
    assert second == first.replace("of rank 0", "of rank 1")
    assert stranger.startswith("ranks 0, 1 do not belong to the run of rank 2: ")


class Repeating:
    """A stranger without the secret, who shows what rank 0 shows, or what it was shown in another run."""

    def __init__(self, control, earlier: list[bytes]) -> None:
        self._control, self.rank, self.size = control, control.rank, control.size
        self._earlier = earlier

    def gather(self, payload: bytes) -> list[bytes]:
        if self.rank == 1 and len(payload) == 32:
            payload = self._earlier[0]
        return self._control.gather(payload)


def test_replayed_membership_digest_is_rejected():
    """Neither a digest of an earlier start with the same secret, nor the one of another rank."""
    seen: list[bytes] = []

    class Listening:
        def __init__(self, control) -> None:
            self._control, self.rank, self.size = control, control.rank, control.size

        def gather(self, payload: bytes) -> list[bytes]:
            found = self._control.gather(payload)
            if self.rank == 0 and len(payload) == 32:
                seen.extend(found)
            return found

    assert said([ONE, ONE], Listening) == [None, None]
    (honest, _) = said([ONE, ONE], lambda control: Repeating(control, [seen[1]]))
    assert honest is not None
    assert honest.startswith("rank 1 does not belong to the run of rank 0")
    (honest, _) = said([ONE, ONE], lambda control: Repeating(control, [seen[0]]))
    assert honest is not None


def test_run_secret_covers_user_secret_and_run_id():
    """Secret and run id cannot be swapped."""
    given = [{}, {"TORCHELASTIC_RUN_ID": "a"}, {"SPMD_WORKER_SECRET": "a"}, {"SPMD_WORKER_SECRET": "\udcff"}]
    assert len({run_secret(each) for each in given}) == len(given)
    # Each node's agent counts restarts for itself.
    assert run_secret({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}) == run_secret(given[1])


def test_ranks_with_another_secret_do_not_start():
    source = f"""
        import os
        from spmd_worker.base.errors import RanksDisagreeError
        from spmd_worker.llm import LLM
        os.environ["SPMD_WORKER_SECRET"] = os.environ["RANK"] if os.environ["PLANTED"] else "ours"
        try:
            LLM({str(ranks.REPOSITORY / "scripts" / "demo" / "model")!r}, tensor_parallel_size=2, num_blocks=20).close()
        except RanksDisagreeError as error:
            os.write(1, f"{{error}}\\n".encode())
        """
    done = ranks.run_ranks(source, 2, 240.0, env={"PLANTED": "1"}).checked()
    assert sorted(line.partition(":")[0] for line in done.stdout.splitlines()) == [
        "rank 0 does not belong to the run of rank 1",
        "rank 1 does not belong to the run of rank 0",
    ], done.output
    done = ranks.run_ranks(source, 2, 240.0, env={"PLANTED": ""})
    assert (done.returncode, done.stdout) == (0, ""), done.output
