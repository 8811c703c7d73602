"""Choice of decode steps that are verified: of every few one, and of its rows one, which is computed again alone.

The canary of what makes a row's answer its own: a kernel, an exchange or a batch that lets other rows in.
"""


class StepVerifier:
    """Chooses one of `interval` steps that continue sequences, and the next of its rows; 0: none."""

    def __init__(self, interval: int) -> None:
        assert interval >= 0, interval
        self._interval, self._num_steps_left, self.num_chosen = interval, interval, 0

    def choose(self, num_rows: int) -> tuple[int, ...]:
        """Count a step that continues `num_rows` sequences; returns `StepPlan.repeated_rows`."""
        if not self._interval or not num_rows:
            return ()
        self._num_steps_left -= 1
        if self._num_steps_left > 0:
            return ()
        self._num_steps_left = self._interval
        self.num_chosen += 1
        return ((self.num_chosen - 1) % num_rows,)
