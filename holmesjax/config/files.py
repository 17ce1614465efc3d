"""Run files: read with presets and overrides below and above them, and written."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holmesjax.config.mistakes import mistakes_of
from holmesjax.config.model_sections import PRESET, LoraConfig, ModelConfig
from holmesjax.config.sections import Config
from holmesjax.errors import ConfigError, Mistakes
from holmesjax.files import schema, yaml_files
from holmesjax.files.yaml_files import Document

CHECKOUT = Path(__file__).parent.parent.parent
GONE = {"distributed.transport": "delete it: boundaries always travel over TCP"}


# By the setting that names a folder: the function that gives the settings in it.
SettingsOf = Mapping[str, Callable[[str], Mapping[str, Any]]]


def load(
    path: str | Path,
    overrides: str | Sequence[str] | Mapping[str, Any] = (),
    settings_of: SettingsOf | None = None,
) -> Config:
    """Reads a run from a YAML file, with `"a.b=value"` overrides on top of it.

    Args:
      path: of the file.
      overrides: settings that replace those of the file, also as `{"a.b": value}`.
      settings_of: gives the settings of `model` that the folder `hf` has, and those of
        `model.lora` that the folder `peft` has. None: the run file must have all of them.

    Raises `Mistakes` with every mistake of the file and of the overrides at once.
    """
    overrides = yaml_files.as_overrides(overrides)
    document = yaml_files.read(path, ConfigError, overrides)
    document = _with_base(document, path, overrides, settings_of)
    if settings_of is not None:
        _put_below_lora(document, settings_of)
    if "clusters" in document.values and "model" not in document.values:
        problem, fix = "is a topology, not a run", "name a file of configs/runs/"
        raise ConfigError(str(path), problem, found="the key `clusters`", fix=fix)
    known, mistakes = schema.read(Config, document, GONE)
    for mistake in mistakes_of(schema.known_values(known)):
        keys = tuple(mistake.where.split("."))
        mistakes.append(
            document.mistake(keys, mistake.problem, found=mistake.found, fix=mistake.fix)
        )
    if mistakes:
        raise Mistakes(mistakes)
    config: Config = schema.build(known)
    return config


def where_set(
    path: str | Path, overrides: Sequence[str], section: str, names: Iterable[str]
) -> str:
    """The place of settings of a section: lines of the run file, and overrides.

    >>> where_set("configs/runs/quickstart.yaml", ["parallel.data=2"], "parallel", ["data"])
    'parallel.data=2'
    """
    document = yaml_files.read(path, ConfigError, overrides)
    lines, late = [], []
    for keys in ((section, name) for name in names):
        if override := document.overrides.get(keys) or document.overrides.get(keys[:1]):
            late.append(override)
        elif keys in document.lines:
            lines.append(document.lines[keys])
    word = "line" if len(lines) == 1 else "lines"
    of_file = [f"{path}, {word} {', '.join(map(str, sorted(lines)))}"] if lines else []
    return " and ".join([*of_file, *dict.fromkeys(late)])


def preset(name: str) -> dict[str, Any]:
    """The settings of a model of `configs/models/`, by its name.

    >>> ModelConfig(**preset("llama3_1_8b")).kv_heads
    8

    Raises:
      ConfigError: there is no such model.
    """
    known = {path.stem: path for path in sorted(CHECKOUT.glob("configs/models/*.yaml"))}
    if not isinstance(name, str) or name not in known:
        fix = f"{schema.near(name, list(known))} (in configs/models/)"
        raise ConfigError("model.preset", "no such model", found=yaml_files.shown(name), fix=fix)
    return yaml_files.read(known[name], ConfigError).values


def _with_base(
    document: Document,
    path: str | Path,
    overrides: Sequence[str],
    settings_of: SettingsOf | None,
) -> Document:
    """The document of a file, with settings below its own: those of a preset or a folder it names.

    An override may name a preset or a folder. Where the file names another one, the settings beside
    it stay on top of the new one; else the new one stands for all of the file's section. A folder
    is not read where the section has all settings, as that of a saved run.
    """
    model = document.values.get("model")
    if not isinstance(model, dict):
        return document
    key = PRESET if PRESET in model else "hf"
    name, values = model.get(key), {}
    if key == PRESET and name is not None:
        try:
            values = preset(name)
        except ConfigError as unknown:
            problem, fix = unknown.problem, unknown.fix
            mistake = document.mistake(("model", key), problem, found=unknown.found, fix=fix)
            raise Mistakes([*document.mistakes, mistake]) from None
    elif key == "hf":
        names = {field.name for field in dataclasses.fields(ModelConfig)}
        if settings_of is None or not isinstance(name, str) or names <= model.keys():
            return document
        values = dict(settings_of["hf"](name))
    is_override = ("model", key) in document.overrides

    def put_below(sections: dict[str, Any]) -> None:
        own = sections.get("model") or {}
        if is_override and name is not None and own.get(key) is None:
            own = {}
        sections["model"] = {**values, **own}

    found = yaml_files.read(path, ConfigError, overrides, put_below)
    found.values["model"].pop(PRESET, None)
    return found


def _put_below_lora(document: Document, settings_of: SettingsOf) -> None:
    """Fills in settings that `model.lora` lacks from the folder `peft`."""
    model = document.values.get("model")
    lora = model.get("lora") if isinstance(model, dict) else None
    if not isinstance(lora, dict) or not isinstance(lora.get("peft"), str):
        return
    if not {field.name for field in dataclasses.fields(LoraConfig)} <= lora.keys():
        document.values["model"]["lora"] = {**settings_of["peft"](lora["peft"]), **lora}


def topology_path(config: Config, run_file: str | Path) -> Path:
    """The topology file of a run: from the current folder, the checkout, or beside the run file."""
    folders = [Path.cwd(), CHECKOUT, Path(run_file).parent]
    candidates = [folder / config.topology for folder in folders]  # an absolute path stays as it is
    for candidate in candidates:
        if yaml_files.may_be_file(candidate):
            return candidate
    known = {path.stem: path for path in sorted(CHECKOUT.glob("configs/topologies/*.yaml"))}
    found = f"{config.topology}, looked for in {', '.join(map(str, dict.fromkeys(folders)))}"
    here = [path.name for folder in (folders[0], folders[-1]) for path in folder.glob("*.yaml")]
    if close := difflib.get_close_matches(config.topology, here, n=1, cutoff=0.8):
        fix = f"did you mean {close[0]}?"
    else:
        near = schema.near(Path(config.topology).stem, list(known))
        fix = f"{near} (write configs/topologies/NAME.yaml)"
    raise ConfigError("topology", "no such file", found=found, fix=fix)


def to_yaml(config: Config) -> str:
    """The file of a run with every default written out; `load` reads it back as equal."""
    return yaml_files.to_text(dataclasses.asdict(config))


def save(config: Config, path: str | Path) -> None:
    """Writes the resolved run."""
    Path(path).write_text(to_yaml(config), encoding="utf-8")
