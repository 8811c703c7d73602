"""Places that an image may come from: what is read, and what is refused with which code."""

import base64
import os
from pathlib import Path

import pytest

from spmd_worker.media.errors import MediaError
from spmd_worker.media.source import AUDIO, read_source

MOST = 64
DATA = bytes(range(48))


def code_of(source: bytes | str | Path, root: Path | None = None, max_bytes: int = MOST) -> str:
    with pytest.raises(MediaError) as caught:
        read_source(source, root, max_bytes)
    assert str(caught.value)
    return caught.value.code


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a b.png").write_bytes(DATA)
    (tmp_path / "outside.png").write_bytes(b"secret")
    (tmp_path / "root-beside").mkdir()
    (tmp_path / "root-beside" / "c.png").write_bytes(b"secret")
    return folder


@pytest.mark.parametrize(
    "source", ["https://me:planted@host/a.png?sig=planted", Path("s3://me:planted@b/a.png?sig=planted")]
)
def test_url_is_shown_without_its_credentials(source: str | Path, root: Path):
    with pytest.raises(MediaError) as caught:
        read_source(source, root, MOST)
    assert "a.png?..." in str(caught.value)
    assert "planted" not in str(caught.value)


ENCODED = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{ENCODED}",
        f"DATA:;BASE64,{ENCODED}",
        f"data:text/html;charset=utf-8;base64,{ENCODED}",
        f"data:image/png;base64,{ENCODED[:20]} \n\t{ENCODED[20:]}\n",
        "data:image/png;base64," + ENCODED.replace("+", "%2B").replace("/", "%2F").replace("A", "%41"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in DATA),
    ],
    ids=["base64", "capitals", "other type", "blanks", "percent in base64", "percent"],
)
def test_data_url_is_decoded(url: str):
    assert read_source(url, None, MOST) == DATA


def test_data_url_without_padding_is_decoded():
    assert read_source("data:;base64,QQ", None, MOST) == b"A"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64", "image_unreadable"),
        ("data:image/png;base64,!!!!", "image_unreadable"),
        ("data:image/png;base64,QQQQQ", "image_unreadable"),
        ("data:image/png;base64,\u00e9\u00e9\u00e9\u00e9", "image_unreadable"),
        ("data:image/png;base64," + "A" * 88, "image_too_large"),
        ("data:image/png;base64," + " " * 1000 + "AAAA", "image_too_large"),
        ("data:image/png," + "%41" * 65, "image_too_large"),
        ("data:image/png," + "a" * 10_000, "image_too_large"),
    ],
)
def test_bad_data_url_has_its_code(url: str, code: str):
    assert code_of(url) == code


def test_bytes_beyond_the_limit_are_refused():
    assert read_source(b"x" * MOST, None, MOST) == b"x" * MOST
    assert code_of(b"x" * (MOST + 1)) == "image_too_large"


def test_paths_below_the_root_are_read(root: Path):
    path = root / "inner" / "a b.png"
    os.symlink("a b.png", root / "inner" / "link.png")
    os.symlink("inner", root / "folder")
    for source in (
        *(path, str(path), "inner/a b.png", f"file://{str(path).replace(' ', '%20')}", "inner/../inner/a b.png"),
        *(f"file://localhost{path}", "inner/link.png", "folder/link.png", Path("inner") / "a b.png"),
    ):
        assert read_source(source, root, MOST) == DATA


def test_root_may_itself_be_a_link(root: Path, tmp_path: Path):
    os.symlink(root, tmp_path / "link")
    assert read_source("inner/a b.png", tmp_path / "link", MOST) == DATA
    assert read_source(tmp_path / "link" / "inner" / "a b.png", root, MOST) == DATA


@pytest.mark.guarantee("Images are read below media_root alone (SECURITY.md)")
def test_paths_outside_of_the_root_are_refused(root: Path, tmp_path: Path):
    os.symlink(tmp_path / "outside.png", root / "link.png")
    os.symlink(tmp_path, root / "up")
    outside = (
        *("../outside.png", tmp_path / "outside.png", f"file://{tmp_path}/outside.png", "link.png", "up/outside.png"),
        *("../root-beside/c.png", "/etc/passwd", "file:///etc/passwd", "file://server/share.png", "%2e%2e/outside.png"),
    )
    codes = {str(source): code_of(source, root) for source in outside}
    # Not decoded: this is a name.
    assert codes.pop("%2e%2e/outside.png") == "image_missing"
    assert set(codes.values()) == {"image_outside_root"}
    assert code_of("file:%2e%2e/outside.png", root) == "image_outside_root"


@pytest.mark.control("Images are read below media_root alone (SECURITY.md)")
def test_paths_compared_as_text_would_be_let_through(root: Path, tmp_path: Path):
    beside = tmp_path / "root-beside" / "c.png"
    assert str(beside).startswith(str(root))
    assert str(root / ".." / "outside.png").startswith(f"{root}/")


def test_paths_need_a_root(root: Path):
    for source in (root / "inner" / "a b.png", str(root / "inner" / "a b.png"), "a.png", "file:///a.png"):
        assert code_of(source) == "image_outside_root"


def test_link_exchanged_after_the_check_is_not_followed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The path is resolved, then a folder of it becomes a link to another place."""
    resolve = os.path.realpath
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a b.png").write_bytes(b"secret")

    def exchanged(path: str, strict: bool = False) -> str:
        found = resolve(path, strict=strict)
        if found.endswith("png"):
            os.rename(root / "inner", root / "before")
            os.symlink(tmp_path / "outside", root / "inner")
        return found

    monkeypatch.setattr(os.path, "realpath", exchanged)
    assert code_of("inner/a b.png", root) == "image_missing"


def test_other_than_regular_files_are_refused(root: Path):
    os.mkfifo(root / "fifo")
    (root / "unreadable\udcff").write_bytes(b"")
    for source in ("fifo", "inner", ".", "", "missing.png", "inner/a b.png/x", "a\0b", "x" * 5000, "fifo/x"):
        assert code_of(source, root) == "image_missing"
    assert read_source("unreadable\udcff", root, MOST) == b""


def test_device_is_refused():
    assert code_of("null", Path("/dev")) == "image_missing"
    assert code_of("zero", Path("/dev")) == "image_missing"


def test_loop_of_links_is_refused(root: Path):
    os.symlink("loop", root / "loop")
    assert code_of("loop", root) == "image_missing"
    assert code_of("a.png", root / "nowhere") == "image_missing"


def test_file_beyond_the_limit_is_not_read(root: Path):
    with open(root / "large", "wb") as file:
        file.truncate(1 << 40)
    assert code_of("large", root) == "image_too_large"
    # Files of the kernel say that they are empty.
    assert code_of("status", Path("/proc/self")) == "image_too_large"


@pytest.mark.parametrize("url", ["http://a/b.png", "https://a/b.png", "s3://a/b.png", "HTTPS://A/B.PNG", "ftp://a/b"])
def test_images_are_not_downloaded(url: str, root: Path):
    with pytest.raises(MediaError, match="download it first") as caught:
        read_source(url, root, MOST)
    assert caught.value.code == "images_unsupported"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (bytes(MOST + 1), "audio_too_large"),
        ("data:audio/wav;base64", "audio_unreadable"),
        ("https://a/b.wav", "audio_unsupported"),
        ("inner", "audio_missing"),
        ("../outside.png", "audio_outside_root"),
        ("file://host/a.wav", "audio_outside_root"),
    ],
)
def test_codes_of_audio_are_its_own(source: bytes | str, code: str, root: Path):
    with pytest.raises(MediaError) as caught:
        read_source(source, root, MOST, AUDIO)
    assert caught.value.code == code
    assert "image" not in str(caught.value)
