"""Formats numbers, durations and shares for people."""


def count(value: float, noun: str = "") -> str:
    """Count with a noun: `1 step`, `1,200 steps`, `2.5 steps`, or only the number."""
    return " ".join(count_and_noun(value, noun)).rstrip()


def count_and_noun(value: float, noun: str) -> tuple[str, str]:
    """Number and noun: `1` and `step`, or `1,200` and `steps`."""
    number = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
    return number, noun if number == "1" or not noun else f"{noun}s"


def compact(value: int) -> str:
    """Number of at most seven characters: `99,999`, `284k`, `3.31M`, `12G`."""
    if value < 100_000:
        return f"{value:,}"
    for power, suffix in ((1e9, "G"), (1e6, "M")):
        if value >= 0.9995 * power:
            return f"{value / power:.3g}{suffix}"
    return f"{value / 1e3:.0f}k"


def duration(microseconds: float) -> str:
    """Readable duration: `0 s`, `850 µs`, `12.3 ms`, `4.56 s`, `3 min 05 s`, `2 h 03 min`."""
    if not microseconds:
        return "0 s"
    if microseconds < 1_000:
        return f"{microseconds:.0f} µs"
    if microseconds < 999_500:
        milliseconds = microseconds / 1e3
        return f"{milliseconds:.0f} ms" if milliseconds >= 99.95 else f"{milliseconds:.1f} ms"
    seconds = microseconds / 1e6
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 9.995 else f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def share(part: float, total: float) -> str:
    """Share in percent: `41 %`, `3.2 %`, `under 0.1 %`; `0 %` if the total is 0."""
    percent = 100 * part / total if total else 0.0
    if 0 < percent < 0.1:
        return "under 0.1 %"
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.1f} %"


def shortened(name: str, characters: int) -> str:
    """The beginning and the end of a name, which tell workers of a host apart."""
    if len(name) <= characters:
        return name
    tail = characters // 2
    return f"{name[: characters - tail - 1]}…{name[len(name) - tail :]}"
