"""Load a complete, checked, frozen config from a YAML file and overrides; report all errors together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tandem.config.changed_models import with_changed_models
from tandem.config.check import check
from tandem.config.fitted import fitted
from tandem.config.generate import OTHER_NAMES, EvalConfig, GenerateConfig, TriedConfig
from tandem.config.root import TrainConfig
from tandem.config.rules import RULES
from tandem.config.schema import Key, is_no_number, keys, nested, sections, shown, unknown_key, value_at
from tandem.config.section import Section, nearest_remedy
from tandem.config.snapshots import snapshots
from tandem.config.sources import Overrides, read_sources
from tandem.config.supervised import RMConfig, SFTConfig
from tandem.config.trainer import TrainerConfig
from tandem.config.verl import DEFAULTS, averaged_by_verl, differing
from tandem.config.written import LEFT_OUT, places_left_out, plain, with_references
from tandem.errors import ConfigError, ConfigErrors, TandemError
from tandem.peers.table import Reading, rule_of
from tandem.peers.translate import Rules, translate

C = TypeVar("C", bound=Section)


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A loaded config, with the notices for the user.

    Attributes:
        config: the config. Every key has a value.
        notices: sentences about keys of other programs, renamed keys and unused keys.
        given: the keys that the user set.
        readings: the translation of each key of another program's command line.
        other_defaults: for a command line with keys of verl: a sentence about the defaults that differ from
            verl's.
        chosen: a dict from key to (value, reason), for keys that the user did not set and whose values were
            chosen to suit the run.
    """

    config: C
    notices: tuple[str, ...]
    given: frozenset[str] = frozenset()
    readings: tuple[Reading, ...] = ()
    other_defaults: str | None = None
    chosen: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def messages(self) -> tuple[str, ...]:
        """The notices, and sentences about the defaults."""
        chosen = "; ".join(f"{name}={shown(value)} ({why})" for name, (value, why) in self.chosen.items())
        fits = (f"Tandem chose these settings, because you did not set them: {chosen}",) if chosen else ()
        return self.notices + fits + ((self.other_defaults,) if self.other_defaults else ())


def load_train_config(
    path: str | None = None,
    overrides: Overrides = (),
    *,
    count_rows: Callable[[Sequence[str], int], int] | None = None,
    elsewhere: bool = False,
) -> Loaded[TrainConfig]:
    """Return the config of `tandem train`.

    Args:
        path: a YAML file with the values that differ from the defaults, if any.
        overrides: texts `key=value`, whose values are in YAML; or dicts from key (dotted or nested) to value.
            Overrides take precedence over the file, and later overrides over earlier overrides.
        count_rows: counts the rows of files, up to a limit (-1: all). If given, keys that the user did not
            set get values that suit the run, unless the command line is verl's. None: these keys get their
            defaults.
        elsewhere: the run is for another machine, so its files and folders need not exist here.

    Raises:
        ConfigErrors: everything that is wrong.
    """
    loaded = _load(TrainConfig, rule_of, path, overrides, elsewhere=elsewhere)
    config = loaded.config
    if count_rows is None or loaded.readings or config.trainer.defaults == "verl":
        return loaded
    rows = None
    with suppress(TandemError):  # what reads the file later reports the error
        rows = count_rows(config.data.train_files, config.data.train_max_samples)
    chosen = fitted(config, loaded.given, rows)
    if not chosen:
        return loaded
    fits = {name: value for name, (value, _) in chosen.items()}
    fitting = _load(TrainConfig, rule_of, path, [fits, *overrides], elsewhere=elsewhere)
    return replace(fitting, chosen=chosen)


def load_sft_config(path: str | None = None, overrides: Overrides = ()) -> Loaded[SFTConfig]:
    """Return the config of `tandem sft`; see `load_train_config`."""
    return _load(SFTConfig, _no_rule, path, overrides)


def load_rm_config(path: str | None = None, overrides: Overrides = ()) -> Loaded[RMConfig]:
    """Return the config of `tandem rm`; see `load_train_config`."""
    return _load(RMConfig, _no_rule, path, overrides)


def load_generate_config(path: str | None = None, overrides: Overrides = ()) -> Loaded[GenerateConfig]:
    """Return the config of `tandem generate`; see `load_train_config`."""
    return _load(GenerateConfig, OTHER_NAMES.get, path, overrides)


def load_eval_config(path: str | None = None, overrides: Overrides = ()) -> Loaded[EvalConfig]:
    """Return the config of `tandem eval`; see `load_train_config`."""
    return _load(EvalConfig, OTHER_NAMES.get, path, overrides)


def load_tried_config(folder: str, overrides: Overrides = ()) -> Loaded[TriedConfig]:
    """Return the config of `tandem check --model`; see `load_train_config`."""
    return _load(TriedConfig, _no_rule, None, [{"model.path": folder}, *overrides])


def load_data_config(root: type[C], overrides: Overrides) -> C:
    """Return the config for a command that only reads data. If no model is given, its path is "".

    Any key of `root` may be given. Only single values are checked, not rules about several keys.

    Raises:
        ConfigErrors: everything that is wrong.
    """
    rules = rule_of if root is TrainConfig else _no_rule
    tree, errors, *_ = read_sources(None, overrides)
    flat, unknown = _flatten(root, rules, tree)
    found = translate(flat, keys(root), rules, _trainer(flat).devices_of)
    found.given.update(snapshots(root, found.given))
    config, wrong = _build(root, found.given)
    wrong = [
        each for each in wrong if each.message != "missing" or not str(each.field).endswith("model.path")
    ]
    if problems := errors + unknown + found.errors + wrong:
        raise ConfigErrors(problems, found.readings)
    return config


def _no_rule(name: str) -> None:
    """Return None: no key is translated, because this command does not accept keys of other programs."""


def _load(
    root: type[C], rules: Rules, path: str | None, overrides: Overrides, *, elsewhere: bool = False
) -> Loaded[C]:
    tree, errors, notices, raw = read_sources(path, overrides)
    flat, unknown = _flatten(root, rules, tree)
    found = translate(flat, keys(root), rules, _trainer(flat).devices_of)
    asked_of_verl = found.given.get("trainer.defaults") == "verl"
    if asked_of_verl:
        found = averaged_by_verl(found)
    filled = dict(found.given)
    folders = {} if elsewhere else snapshots(root, found.given)
    found.given.update(folders)
    config, wrong = _build(root, {**(DEFAULTS if asked_of_verl else {}), **found.given})
    bad = _with_heirs(root, found.given, frozenset(str(error.field) for error in wrong))
    if elsewhere:
        wrong = [error for error in wrong if error.message != "missing" or error.field not in _DATA]
        bad |= {name for name in keys(root) if name.endswith(_PLACES)}
    changed = frozenset(name for name in found.given if value_at(config, name) != _unset(root, config, name))
    off = frozenset(name for name, value in found.given.items() if value is False) - changed
    lenient = asked_of_verl or bool(found.readings)
    findings = check(config, changed, bad, RULES[root], lenient=lenient, off=off)
    order = {name: place for place, name in enumerate(keys(root))}
    late = sorted(wrong + findings.errors, key=lambda error: order.get(str(error.field), len(order)))
    texts = _flatten(root, rules, raw)[0]
    if problems := errors + unknown + found.errors + late:
        for problem in problems:
            if problem.got is not None and "${" in repr(text := texts.get(str(problem.field))):
                problem.got = shown(text)
        raise ConfigErrors(problems, found.readings)
    asks = bool(found.readings) and root is TrainConfig and not asked_of_verl
    other = differing(found.given) if asks else None
    lines = (*notices, *found.notices, *(f"{name} is {folder}" for name, folder in folders.items()))
    lines += tuple(findings.notices)
    try:
        config, changed_models = with_changed_models(config)
    except ConfigError as error:
        raise ConfigErrors([error], found.readings) from error
    lines += tuple(changed_models)
    if "oc.env" in repr(raw):
        values = {**(DEFAULTS if asked_of_verl else {}), **filled}
        origins = {name: texts[origin] for name, origin in found.origins.items() if origin in texts}
        config = with_references(config, values, origins, keys(root).values())
    return Loaded(config, lines, frozenset(found.given), tuple(found.readings), other)


_PLACES = ("path", "train_files", "val_files", ".models")
"""The suffixes of the keys that name files and folders."""
_DATA = ("data.train_files", "data.val_files")


def _flatten(
    root: type[Section], rules: Rules, tree: Mapping[str, Any]
) -> tuple[dict[str, Any], list[ConfigError]]:
    """Return a dict from dotted path to given value, and an error for each path that is not a key.

    An inherited key with the value null counts as not given. So does an empty section.
    """
    known, parents = keys(root), sections(root)
    flat: dict[str, Any] = {}
    errors: list[ConfigError] = []

    def visit(name: str, value: Any) -> None:
        rule = None if name in known else rules(name)
        whole = rule is not None and rule.now != () and set(rule.now) <= known.keys()
        if name in known:
            value = _own_part(name, value, rules, visit)
            left_out = [] if known[name].required else list(places_left_out(value, name))
            errors.extend(_left_out(place) for place in left_out)
            if not left_out and (value is not None or known[name].inherits is None):
                flat[name] = value if value != LEFT_OUT else None
        elif isinstance(value, Mapping) and value and not whole:
            for child, inner in value.items():
                visit(f"{name}.{child}", inner)
        elif rule is not None:
            flat[name] = value
        elif name not in parents:
            errors.append(unknown_key(name, known))
        elif value is not None and value != {}:
            remedy = f"set the keys below it: {name}.<key>=…"
            errors.append(
                ConfigError("this is a section, not a key", field=name, got=shown(value), remedy=remedy)
            )

    for name, value in tree.items():
        visit(name, value)
    return flat, errors


def _left_out(place: str) -> ConfigError:
    return ConfigError(
        "this value must be given",
        field=place,
        got=LEFT_OUT,
        expected="a value; written configs never contain secrets",
        remedy=f"add {place}=…, or set it to a reference such as ${{oc.env:NAME}}",
    )


def _trainer(flat: Mapping[str, Any]) -> TrainerConfig:
    """Return the `trainer` section with those pools and placements whose given values are valid."""
    names = ("n_gpus_per_node", "nnodes", "resource_pools", "placement")
    given = {name: flat[f"trainer.{name}"] for name in names if f"trainer.{name}" in flat}
    try:
        trainer = TrainerConfig.model_validate(given)
    except ValidationError:
        return TrainerConfig()
    known = {role: pool for role, pool in trainer.placement.items() if pool in trainer.pools}
    return trainer.model_copy(update={"placement": known})


def _own_part(name: str, value: Any, rules: Rules, visit: Callable[[str, Any], None]) -> Any:
    """Return a key's value without the entries that are keys of other programs, and visit these entries."""
    if not isinstance(value, Mapping):
        return value
    rest = {}
    for child, inner in value.items():
        at = f"{name}.{child}"
        if rules(at) is not None:
            visit(at, inner)
        elif (left := _own_part(at, inner, rules, visit)) != {} or inner == {}:
            rest[child] = left
    return rest


def _build(root: type[C], given: Mapping[str, Any]) -> tuple[C, list[ConfigError]]:
    """Return the config and the errors of invalid values; for later checks, defaults replace such values."""
    known = keys(root)
    missing = [key for key in known.values() if key.required and given.get(key.name) is None]
    errors = [_missing(key) for key in missing]
    usable = {name: value for name, value in given.items() if known[name] not in missing}
    while True:
        values, found = _resolve(root, usable)
        try:
            config = root.model_validate(values)
        except ValidationError as invalid:
            found += _invalid(root, usable, values, invalid.errors(include_url=False))
        if not found:
            return config, errors
        errors += found
        usable = {name: value for name, value in usable.items() if name not in {e.field for e in found}}


def _missing(key: Key) -> ConfigError:
    return ConfigError("missing", field=key.name, expected=key.expected, remedy=f"add {key.name}=…")


def _resolve(root: type[Section], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigError]]:
    """Return the config as nested dicts, with defaults, inherited values and resolved interpolations."""
    known = keys(root)
    if "${" not in repr(given) and "???" not in repr(given):  # OmegaConf would take ten times as long
        return nested({name: _value(known, name, given) for name in known}), []
    defaults = {key.name: key.fallback for key in known.values()}
    tree = OmegaConf.create(nested({**defaults, **given}))
    errors = []
    for name, value in given.items():
        try:
            plain(tree, name)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            errors.append(ConfigError(f"cannot be resolved: {reason}", field=name, got=value))
    for problem in errors:
        OmegaConf.update(tree, str(problem.field), defaults[str(problem.field)], merge=False)
    values = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}, errors


def _value(known: Mapping[str, Key], name: str, given: Mapping[str, Any]) -> Any:
    """Return the given value of a key, else its inherited value, else its resolved default."""
    if name in given:
        return given[name]
    if (source := known[name].inherits) is not None:
        return _value(known, source, given)
    default = known[name].fallback
    if not isinstance(default, str):
        return default
    return re.sub(r"\$\{([^}]+)\}", lambda other: str(_value(known, other[1], given)), default)


def _invalid(
    root: type[Section], given: Mapping[str, Any], values: Mapping[str, Any], details: list[ErrorDetails]
) -> list[ConfigError]:
    """Return an error for each value that pydantic refused; for an inherited value, name the source key."""
    errors: dict[str, ConfigError] = {}
    for detail in details:
        name = _name_of(root, detail["loc"])
        key = keys(root)[name]
        while name not in given:
            inherits = keys(root)[name].inherits
            assert inherits is not None, f"the default of {name} is not valid: {detail}"
            name = inherits
        got: Any = values
        for part in name.split("."):
            got = got[part]
        errors.setdefault(name, _refused(name, got, key.expected, detail))
    return list(errors.values())


def _name_of(root: type[Section], loc: tuple[int | str, ...]) -> str:
    """Return the dotted key of a pydantic error, from the error's location."""
    paths = (".".join(str(part) for part in loc[:end]) for end in range(len(loc), 0, -1))
    return next(path for path in paths if path in keys(root))


_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
_NUMBERS = {"float_type", "int_type", "int_from_float"}


def _refused(name: str, got: Any, expected: str, detail: ErrorDetails) -> ConfigError:
    kind = detail["type"]
    message, remedy = "wrong type", None
    if kind in _OUT_OF_RANGE or (kind in _NUMBERS and is_no_number(detail["input"])):
        message = "out of range"
    elif kind == "too_short":
        message = "the list is empty"
    elif kind == "unknown_name":
        message, remedy = "unknown value", detail["ctx"]["remedy"]
    elif kind == "literal_error":
        message = "unknown value"
        remedy = nearest_remedy(str(got), expected.removeprefix("one of ").split(", "))
    elif kind == "string_type" and isinstance(got, (int, float)):
        remedy = f"to set it to a text, use two pairs of quotes: {name}='\"{got}\"'"
    return ConfigError(message, field=name, got=shown(got), expected=expected, remedy=remedy)


def _with_heirs(root: type[Section], given: Mapping[str, Any], bad: frozenset[str]) -> frozenset[str]:
    """Return the keys in `bad`, and the keys that inherit their values from these keys."""
    known = keys(root)

    def tainted(name: str | None) -> bool:
        return name is not None and (name in bad or (name not in given and tainted(known[name].inherits)))

    return frozenset(name for name in known if tainted(name))


def _unset(root: type[Section], config: Section, name: str) -> Any:
    """Return the value that the key would have if the user had not set it."""
    key = keys(root)[name]
    return value_at(config, key.inherits) if key.inherits is not None else key.default
