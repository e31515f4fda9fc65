"""The model and its tokenizer: what can be known before the weights are read, and then the weights."""

from __future__ import annotations

import difflib
import json
import pickle
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from torchturbo.checkpoint.damage import index_problem
from torchturbo.checkpoint.weights import WeightSource
from torchturbo.errors import ConfigError, Problem, some
from torchturbo.logging import get_logger
from torchturbo.models import register
from torchturbo.objectives.mtp.families import said_by
from torchturbo.train.arguments import ModelArguments

register()
PLACE = "--model_name_or_path"
log = get_logger(__name__)
WEIGHTS = ("*.safetensors", "*.bin")
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""Names of tables of learned positions in Transformers' models."""
MOST_OFFSET = 2
"""Rows that OPT and its kin keep free at the start of their table."""
IGNORED = "_keys_to_ignore_on_load_unexpected"
"""A model class's patterns of names in checkpoints that it has no use for."""
PATIENCE = 10
"""Seconds to wait for the Hub's first answer."""
NO_NEAR = "give a local folder, or check the name and the network"


def folder_problem(name: str) -> Problem | None:
    """Return what keeps a local folder from being a model; None for a name that can only be the Hub's."""
    path = Path(name).expanduser()
    if not path.exists():
        return missing_folder(name, PLACE)
    if not path.is_dir():
        return Problem(PLACE, "", f"{path} is a file, expected the folder of a model", f"use {path.parent}")
    for entry in sorted(path.iterdir()):
        if entry.exists() and not entry.is_file() and not entry.is_dir():  # a pipe would be waited for
            return Problem(PLACE, "", f"{entry} is no regular file", "remove it")
    config = path / "config.json"
    if not config.is_file():
        inside = sorted(str(found.parent) for found in path.glob("*/config.json"))
        remedy = f"use {inside[-1]}" if inside else "a model folder is what save_pretrained writes"
        return Problem(PLACE, "", f"{path} is no model: no config.json in it", remedy)
    try:
        model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        return Problem(str(config), "", f"can't be read as JSON: {error}")
    if not model_type:
        return Problem(str(config), "", "names no model_type")
    return _weights_problem(path)


def _weights_problem(path: Path) -> Problem | None:
    """Return what the headers of a model's weight files show to be wrong; a file that was cut off is found so."""
    remedy = "was the download or the save interrupted?"
    if not any(True for pattern in WEIGHTS for _ in path.glob(pattern)):
        return Problem(PLACE, "", f"{path} holds no weights (*.safetensors)", remedy)
    if problem := index_problem(path):
        return Problem(PLACE, "", f"{path}: {problem}", remedy)
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return Problem(PLACE, "", f"{file} is broken: {_short(error)}", remedy)
    return None


def missing_folder(name: str, place: str) -> Problem | None:
    """Return a problem for a path that does not exist; None for what exists or can be a name on the Hub.

    Names there are ``name`` or ``owner/name``.
    """
    path = Path(name).expanduser()
    if path.exists() or not (name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or name.endswith("/")):
        return None
    folder = path.parent
    siblings = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return Problem(place, "", f"there is no folder {path}", f"did you mean {folder / near[0]}?" if near else "")


def load_config(arguments: ModelArguments) -> Any:
    """Return the model's configuration; raises :class:`ConfigError` for what is no causal language model."""
    name = _required(arguments)
    if problem := unreachable(name, PLACE, arguments.model_revision):
        raise ConfigError([problem])
    try:
        config = AutoConfig.from_pretrained(
            name, revision=arguments.model_revision, trust_remote_code=arguments.trust_remote_code
        )
    except Exception as error:  # the Hub's, and those of the checks that each configuration has of its own
        raise ConfigError([_hub_problem(PLACE, name, error, "configuration")]) from error
    auto_map = getattr(config, "auto_map", None) or {}
    if type(config) not in AutoModelForCausalLM._model_mapping and "AutoModelForCausalLM" not in auto_map:
        raise ConfigError([Problem(PLACE, "", f"{name}: {config.model_type} is no causal language model")])
    return config


def load_tokenizer(arguments: ModelArguments) -> Any:
    """Return the tokenizer, with the user's chat template where one is given."""
    name = arguments.tokenizer_name or _required(arguments)
    place = "--tokenizer_name" if arguments.tokenizer_name else PLACE
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=arguments.model_revision, trust_remote_code=arguments.trust_remote_code
        )
    except Exception as error:  # tokenizers raises its own types, and plain Exception for a broken file
        raise ConfigError([_hub_problem(place, name, error, "tokenizer")]) from error
    problems = []
    if arguments.chat_template is not None:
        try:
            tokenizer.chat_template = Path(arguments.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(Problem("--chat_template", "", f"{arguments.chat_template} can't be read: {_short(error)}"))
    if not getattr(tokenizer, "is_fast", False):
        problems.append(Problem(place, "", f"{name} has no fast tokenizer, and the prompt is masked by its offsets"))
    if problems:
        raise ConfigError(problems)
    return tokenizer


def pad_token_id(tokenizer: Any) -> int:
    """Return the token that fills a micro-batch up; which one does not matter, since it is masked everywhere."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def empty_model(arguments: ModelArguments, config: Any) -> Any:
    """Return the model without weights, on the meta device; None where its code can't be built there."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=arguments.trust_remote_code)
    except Exception:  # whatever code of its own a model runs; reading its weights will tell what is wrong with it
        return None


def learned_positions(model: torch.nn.Module) -> int | None:
    """Return how many positions a text model has a table for, as GPT-2 and OPT have; None where it computes them.

    ``model`` may hold no weights. A longer sequence would end with an index error inside the table.
    """
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    module: Any
    for name, module in model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES
        if is_table and isinstance(positions, int) and 0 <= module.num_embeddings - positions <= MOST_OFFSET:
            return positions
    return None


def weight_source(arguments: ModelArguments, config: Any) -> WeightSource:
    """Return where the model's weights lie on disk: what a sharded model reads its slices from.

    It also knows the number formats that a run's exports go back to, see :meth:`WeightSource.dtypes`.
    """
    name = _required(arguments)
    dtype = getattr(config, "dtype", None)
    try:
        return WeightSource.find(
            name, revision=arguments.model_revision, dtype=dtype if isinstance(dtype, torch.dtype) else None
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError([_hub_problem(PLACE, name, error)]) from error


def local_source(arguments: ModelArguments, config: Any) -> WeightSource | None:
    """Return the same of a local folder; None for a model of the Hub, whose files are downloaded when they are due."""
    return weight_source(arguments, config) if Path(_required(arguments)).is_dir() else None


def load_model(arguments: ModelArguments, config: Any, source: WeightSource | None = None) -> Any:
    """Return the model in fp32: trainable parameters are held so whatever the checkpoint's format.

    Without ``source`` its weights are read. With it the model is on the meta device: once it is sharded,
    ``source.load`` gives each rank its share. What can't be read so has its weights nevertheless, all of them on every
    rank, and a warning says why; ask a parameter's ``is_meta`` which of the two it is.
    """
    if source is None or not is_streamed(arguments, config, source):
        return _from_pretrained(arguments, config)
    if problems := mismatches(arguments, config, source):
        raise ConfigError(problems)
    model = _from_pretrained(arguments, config, device_map="meta")
    source.tie(model)
    return model


def is_streamed(arguments: ModelArguments, config: Any, source: WeightSource) -> bool:
    """Return whether each rank can read its own slices of a model's weights; a warning says why not."""
    reason = _unstreamed(arguments, config, source)
    if reason is not None:
        log.warning_rank0(
            "%s: %s, so every rank reads the whole model and holds it until it is sharded: "
            "as much host memory as the ranks of a node times the model in fp32",
            source.name,
            reason,
        )
    return reason is None


def _unstreamed(arguments: ModelArguments, config: Any, source: WeightSource) -> str | None:
    """Return why a model's weights can't be read by slices; None where they can."""
    if not source.files:
        return "it has no safetensors files"
    if arguments.trust_remote_code and _comes_with_code(config):
        return "its code is its own, which may compute with weights while it is built"
    if getattr(config, "quantization_config", None) is not None:
        return "it is quantised"
    if getattr(config, "transformers_weights", None) is not None:
        return "its configuration names a weight file of its own"
    return None


def _comes_with_code(config: Any) -> bool:
    """Return whether trusted code of a checkpoint's own makes its model: Transformers prefers a class of ours to it."""
    kind: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    package = "" if kind is None else kind.__module__.partition(".")[0]
    ours = package not in ("", "transformers", "transformers_modules")
    return not ours and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def mismatches(arguments: ModelArguments, config: Any, source: WeightSource) -> list[Problem]:
    """Return what in the weight files' headers does not fit the model, all at once."""
    empty = empty_model(arguments, config)
    if empty is None:
        return []
    found = source.problems(empty)
    return [
        Problem(PLACE, "", f"{source.name} {one.message}", one.remedy) if one.place == source.name else one
        for one in found
    ]


def _from_pretrained(arguments: ModelArguments, config: Any, **more: Any) -> Any:
    """Call ``from_pretrained`` and refuse what it would only print a table about."""
    name = _required(arguments)
    kwargs: dict[str, Any] = {"config": config, "dtype": torch.float32, "revision": arguments.model_revision} | more
    if arguments.attn_implementation is not None:
        kwargs["attn_implementation"] = arguments.attn_implementation
    try:
        with _heads_expected(config):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name, trust_remote_code=arguments.trust_remote_code, output_loading_info=True, **kwargs
            )
    except ImportError as error:
        if arguments.attn_implementation is None:
            raise ConfigError([_hub_problem(PLACE, name, error)]) from error
        message = f"{arguments.attn_implementation}: {_short(error)}"
        raise ConfigError([Problem("--attn_implementation", "", message, "install it, or use sdpa")]) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError([_hub_problem(PLACE, name, error)]) from error
    except pickle.UnpicklingError as error:  # torch advises to run what the file brings along
        message = f"{name}: its weights (*.bin) hold other things than tensors, so they are not loaded"
        remedy = "use its safetensors files, or have whoever made it write some with save_pretrained"
        raise ConfigError([Problem(PLACE, "", message, remedy)]) from error
    except RuntimeError as error:  # shapes that do not fit: it says so in a table, and not where
        if empty_model(arguments, config) is None:  # its sizes are none that a model can have
            raise ConfigError([_hub_problem(PLACE, name, error)]) from error
        if not (problems := mismatches(arguments, config, weight_source(arguments, config))):
            raise
        raise ConfigError(problems) from error
    model, told = loaded
    if missing := sorted(told["missing_keys"]):
        # Transformers fills them with random numbers and prints a table; a run that starts so is hardly ever meant.
        message = f"{name} lacks {len(missing)} of the model's weights: {some(missing)}"
        raise ConfigError([Problem(PLACE, "", message, "use the whole model, as save_pretrained writes it")])
    return model


@contextmanager
def _heads_expected(config: Any) -> Iterator[None]:
    """Have Transformers pass over the weights of extra heads, of which it knows none for many a model, in this block.

    It would print a table of them. The step "extra heads" reads them where they are wanted.
    """
    kind: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    said = None if kind is None else said_by(config)
    if said is None:
        yield
        return
    layers = int(config.get_text_config(decoder=True).num_hidden_layers)
    further = "|".join(str(layers + at) for at in range(said[1])) or "$^"
    before = kind.__dict__.get(IGNORED)
    known = getattr(kind, IGNORED, None) or ()
    setattr(kind, IGNORED, [*known, r"^mtp\.", rf"(^|\.)layers\.({further})\."])
    try:
        yield
    finally:
        if before is None:
            delattr(kind, IGNORED)
        else:
            setattr(kind, IGNORED, before)


def _required(arguments: ModelArguments) -> str:
    assert arguments.model_name_or_path is not None  # parse_framework refuses a command line without it
    path = Path(arguments.model_name_or_path).expanduser()
    return str(path) if path.exists() else arguments.model_name_or_path


def _hub_problem(place: str, name: str, error: Exception, what: str = "model") -> Problem:
    """Return why something could not be loaded, without the trace of the network calls below it."""
    if Path(name).exists():
        return Problem(place, "", f"{name}: no usable {what}: {_short(error)}")
    message = f"{name} is no local folder, and the Hub did not give it: {_short(error)}"
    return Problem(place, "", message, _near_folder(name))


def unreachable(name: str, place: str, revision: str) -> Problem | None:
    """Return a problem for a name that only the Hub could have while the Hub can't be asked; None where it can.

    The libraries would ask again and again for half a minute, with a warning each time; this asks once.
    """
    if constants.HF_HUB_OFFLINE or Path(name).expanduser().exists():
        return None
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:
        return None  # no name that the Hub could have, as the libraries will say
    if isinstance(cached, str):
        return None
    try:
        get_session().head(hf_hub_url(name, "config.json"), timeout=PATIENCE)
    except Exception as error:  # the client's own types, which differ between versions of the library
        message = f"{name} is no local folder, and {constants.ENDPOINT} can't be reached: {_short(error)}"
        return Problem(place, "", message, _near_folder(name))
    return None


def _near_folder(name: str) -> str:
    """Return as a remedy the folder that a mistyped or shortened name may have meant."""
    path = Path(name).expanduser()
    folders = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir()) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, folders, n=1)
    near += [folder for folder in folders if folder.startswith(path.name)]
    return f"did you mean the folder {path.with_name(near[0])}?" if near else NO_NEAR


def _short(error: Exception) -> str:
    """Return the first sentence of an error; Transformers' go on for a paragraph."""
    text = getattr(error, "strerror", None) or str(error)
    return textwrap.shorten(str(text), 200, placeholder=" ...") or type(error).__name__
