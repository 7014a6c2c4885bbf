"""Reads Hugging Face folders: config.json, safetensors, tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from jaxrl_llm.errors import MissingHere, UserError, check_local, describe
from jaxrl_llm.machine import bucket, progress, sharding
from jaxrl_llm.models import names
from jaxrl_llm.models.adapters import Adapters, int8
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.names import TensorNames
from jaxrl_llm.structs import PyTree

DESCRIPTION, WEIGHTS = (".json", ".jinja", ".txt", ".model"), (".safetensors",)  # endings of a model's files
SAMPLED = 2**16  # bytes of each tensor that a fingerprint reads
# Besides config.json and the weights, these files change the input tokens, the output text or the stop ids.
SETTINGS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"
FUSED = ("layers/experts/gate_up/kernel", "layers/experts/down/kernel")  # the experts of a layer in one tensor
HEAD, SCORE = "lm_head.weight", "score.weight"
HEADS = (HEAD, SCORE)  # a model that gives values has neither among its decoder's parameters
# Vision-language models whose config.json does not name the family of their text model -> that family.
VISION = {"internvl_chat": "qwen2", "mllama": "llama", "qwen2_5_omni": "qwen2"}
ADAPTER = "adapter_config.json"  # of a folder that PEFT wrote
# Mean and deviation of each channel of pixels, in CLIP and wherever a file has none.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # in safetensors' words, and in those of config.json


def is_hub_id(path: str) -> bool:
    """Whether a path stands for a model on a hub: it is org/name, and no folder here."""
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", path)) and not Path(path).expanduser().exists()


def find(path: str, field: str = "model.path", *, weights: bool = True) -> Path:
    """Returns the local folder of a checkpoint: `path` itself, or a hub id downloaded to the hub's cache.

    weights: False, to download only what describes the model.
    Raises: UserError, naming `field`, if `path` is neither, or holds adapters.
    """
    check_local(field, path)
    if remote := bucket.address(path):
        folder = bucket.fetch_folder(field, remote, DESCRIPTION + WEIGHTS, DESCRIPTION + WEIGHTS * weights)
    else:
        folder = _download(path, field, weights=weights) if is_hub_id(path) else Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if (folder / ADAPTER).is_file():
        raise UserError(_is_adapter(folder, path, field))
    if remedy := _merging(folder):
        raise UserError(f"{field} {path!r} {remedy}")
    error = UserError if folder.exists() else MissingHere
    raise error(f"{field} {path!r} has no config.json: give a Hugging Face folder or a hub id (org/name)")


def find_here(path: str) -> Path | None:
    """Returns what `find` does for model.path, without a network; None: a hub id that is not in the hub's cache."""
    # Slow to import, and only needed for hub ids.
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(path):
        return find(path, weights=False)
    file = try_to_load_from_cache(path, "config.json")
    return Path(file).parent if isinstance(file, str) else None


def _download(path: str, field: str, *, weights: bool) -> Path:
    # Slow to import, and only needed for hub ids.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # No *.bin and *.pt: they are pickles, which can run code, and would double the download.
        patterns = [f"*{ending}" for ending in DESCRIPTION + WEIGHTS * weights]
        return Path(snapshot_download(path, allow_patterns=patterns))
    # Offline, unknown, gated: the hub raises many types, all for the user.
    except Exception as error:
        remedy = f"fetch it where there is a network (hf download {path} --local-dir DIR) and give that folder"
        if isinstance(error, GatedRepoError):
            remedy = "ask for access on its page, and log in with a token (hf auth login, or HF_TOKEN)"
        elif isinstance(error, RepositoryNotFoundError):
            remedy = "check the name; a private one needs a token (hf auth login, or HF_TOKEN)"
        problem = f"{field} {path!r} is no local folder, and the hub says: {_reason(error)}"
        raise UserError(f"{problem.rstrip('.: ')}: {remedy}") from error


def _is_adapter(folder: Path, path: str, field: str) -> str:
    """Returns the error line for a folder of PEFT where a whole model should be."""
    base = read_config(folder, ADAPTER).get("base_model_name_or_path") or "the model that it adapts"
    line = f"{field} {path!r} holds adapters of PEFT ({ADAPTER}), no model"
    if field == "model.path":
        return f"{line}: give their base, {base}, as model.path and this folder as adapters.path (configs/lora.py)"
    return f"{line}: merge them into their base, {base}, with PEFT (merge_and_unload), and give that"


def _merging(folder: Path) -> str:
    """Says how to merge the shards of veRL's FSDP workers in a folder or beside it; "": there are none."""
    for place in (folder, folder / "actor", folder.parent):
        if any(place.glob("model_world_size_*_rank_*.pt")):
            command = f"python -m verl.model_merger merge --backend fsdp --local_dir {shlex.quote(str(place))}"
            return f"holds the shards of veRL's FSDP: merge them with {command} --target_dir DIR, and give DIR"
    return ""


def _reason(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Reads config.json, or another JSON file of a folder. Raises: UserError, if it holds no JSON object."""
    try:
        settings = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / name} cannot be read ({error}): restore the file") from None
    if not isinstance(settings, dict):
        raise UserError(f"{folder / name} holds no JSON object: restore the file")
    return settings


def load_model(
    folder: Path,
    mesh: Mesh | None = None,
    *,
    family: str = "",
    dtype: str = "float32",
    remat: str = "none",
    row_parts: int = 1,
) -> Decoder:
    """Builds the decoder of a folder on a mesh. family: as of `family_of`.

    Raises: UserError, for a family, quantization or dtype that is not supported.
    """
    hf, family = read_config(folder), family_of(folder, family)
    if hf.get("quantization_config"):
        raise UserError(
            f"{folder / 'config.json'}: quantization_config: quantized weights are not supported; "
            "use the checkpoint that they were made from"
        )
    _named_dtype(folder)
    cfg = replace(read_decoder_config(family, hf), dtype=dtype, remat=remat, row_parts=row_parts)
    if cfg.vision:
        mean, std = pixel_scale(folder)
        cfg = replace(cfg, vision=replace(cfg.vision, mean=mean, std=std))
    return Decoder(cfg, mesh)


def family_of(folder: Path, own: str = "") -> str:
    """Returns the family of a folder: the module of this package that `model_type` names, or else `own`.

    own: dotted name of a function of the user's (`model.family`); "": none. Raises: UserError, if neither is there.
    """
    hf = read_config(folder)
    family = str(hf.get("model_type", ""))
    if family in (known := families()):
        return family
    if not own:
        raise UserError(f"{folder / 'config.json'}: model_type {family!r} {_unsupported(family, hf, known)}")
    return own


def read_decoder_config(family: str, hf: dict[str, Any]) -> DecoderConfig:
    """Returns what a family makes of a config.json, which may be of another family.

    Raises: UserError, if the family or the user's function refuses it.
    """
    try:
        cfg = names.family_function(family)(hf)
    except UserError:
        raise
    except Exception as error:
        if "." not in family:  # a bug of this package
            raise
        raise UserError(f"config.model.family = {family!r} raised {describe(error)}: put the function right") from error
    if not isinstance(cfg, DecoderConfig):
        raise UserError(f"config.model.family = {family!r} returned {cfg!r:.80}: let it return a DecoderConfig")
    return replace(cfg, family=family) if "." in family else cfg


def image_processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file with the settings of images, and these. That of version 5 of transformers comes first.

    Raises: UserError, if there is none.
    """
    if (folder / PROCESSOR).is_file():
        nested = read_config(folder, PROCESSOR).get("image_processor")
        if isinstance(nested, dict):
            return folder / PROCESSOR, nested
    if not (folder / PREPROCESSOR).is_file():
        raise UserError(f"{folder} has no {PREPROCESSOR}, which says how the model reads images: restore the file")
    return folder / PREPROCESSOR, read_config(folder, PREPROCESSOR)


def pixel_scale(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation of the channels of pixels between 0 and 1.

    Raises: UserError, if they are no numbers, or pixels have another range.
    """
    file, settings = image_processor(folder)
    factor = settings.get("rescale_factor", 1 / 255)
    if not settings.get("do_rescale", True) or not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        raise UserError(f"{file}: rescale_factor is {factor!r}, and only 1/255 is supported: restore the file")
    if not settings.get("do_normalize", True):
        return (0.0,) * 3, (1.0,) * 3
    scale: dict[str, tuple[float, ...]] = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    if str(settings.get("image_processor_type", "")).startswith("Gemma3"):
        scale = dict.fromkeys(scale, (0.5,) * 3)
    for name, usual in scale.items():
        # Written by transformers only if it is not the usual one.
        numbers = settings.get(name) or usual
        if not isinstance(numbers, list | tuple) or [type(x) in (int, float) for x in numbers] != [True] * 3:
            raise UserError(f"{file}: {name} is {numbers!r}, and must be three numbers: restore the file")
        scale[name] = tuple(map(float, numbers))
    return scale["image_mean"], scale["image_std"]


def tensor_table(folder: Path, family: str = "") -> TensorNames:
    """Returns the names of a folder's tensors. family: as of `family_of`.

    Raises: UserError, if a file of weights is missing or broken.
    """
    return _table_of(family_of(folder, family), _index(folder) if any(folder.glob("*.safetensors")) else {})


def _table_of(family: str, where: dict[str, Any]) -> TensorNames:
    """Returns the names of the tensors in a folder, and the order of their axes."""
    table = names.table_of(family, where)
    fused = {path: form for path, form in table.items() if path in FUSED and FUSED[0] in table}
    shapes = [where[name].get_slice(name).get_shape() for form in fused.values() if (name := form.format(0)) in where]
    # Width and widths of experts: on the hub the first tensor has the width before the others, and the second behind.
    # Version 5 of transformers writes both as its modules have them.
    if len(shapes) < len(FUSED) or shapes[0][1] == shapes[1][2]:
        return table
    return {**table, **{path: names.Swapped(form) for path, form in fused.items()}}


def _unsupported(family: str, settings: dict[str, Any], known: list[str]) -> str:
    if family not in VISION and "vision_config" not in settings:
        remedy = "or set model.family to a function of yours that reads it (docs/models.md)"
        return f"is not supported; there is {', '.join(known)}; {remedy}"
    text = VISION.get(family) or (settings.get("text_config") or {}).get("model_type")
    other = f" of the family {text}" if text in known else f"; there is {', '.join(known)}"
    seeing = ", ".join(name for name in known if "_vl" in name or name == "gemma3")
    return f"is a vision-language model of a kind that is not supported: give one of {seeing}, or a text model{other}"


def stored_dtype(folder: Path, family: str = "") -> np.dtype:
    """Returns the dtype of the folder's weights: of its files, or of config.json if the folder has no weights.

    family: as of `family_of`. Raises: UserError, if we cannot write it.
    """
    name = _named_dtype(folder)
    embedding = tensor_table(folder, family)["embed/embedding"]
    if any(folder.glob("*.safetensors")) and (file := _index(folder).get(embedding)):
        name = DTYPES.get(file.get_slice(embedding).get_dtype(), name)
    return jax.numpy.dtype(name)


def _named_dtype(folder: Path) -> str:
    """Dtype in config.json. Raises: UserError, if we cannot write it."""
    hf = read_config(folder)
    # Later versions of transformers write dtype, earlier ones torch_dtype.
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES.values():
        raise UserError(f"{folder / 'config.json'}: dtype is {name!r}: give 'float32', 'bfloat16' or 'float16'")
    return name


def families() -> list[str]:
    """Names of the modules in this package that define a model family."""
    package = Path(__file__).parent
    return sorted(f.stem for f in package.glob("*.py") if "\ndef decoder_config(" in f.read_text(encoding="utf-8"))


def load_tokenizer(folder: Path) -> Any:
    """Loads the folder's tokenizer, exactly as tokenizer.json defines it.

    AutoTokenizer is only the fallback. For a Qwen config.json it takes only the vocabulary and the merges, and splits
    text by Qwen's rules. A model trained with another tokenizer, such as a distilled one, then gets wrong token ids.
    Raises: UserError, if there is no tokenizer or it is incomplete.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(str(folder))
    # Transformers raises many types here, all about the files.
    except Exception as error:
        raise UserError(f"{folder}: no tokenizer can be loaded ({_reason(error)}): restore tokenizer.json") from error
    # Transformers returns this for missing files.
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
        raise UserError(f"{folder}: the tokenizer has no vocabulary: restore tokenizer.json")
    # Padding is never attended to or scored, so any id works.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a completion, from generation_config.json, config.json and the tokenizer together.

    Raises: UserError, if there is none, because a completion would never end.
    """
    # Each of the three may miss some: a chat model's end of turn often stands in generation_config.json alone.
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            settings = read_config(folder, name)
            # A model that reads images may have it among the settings of its text model.
            value = settings.get("eos_token_id", (settings.get("text_config") or {}).get("eos_token_id"))
            values = value if isinstance(value, list) else [] if value is None else [value]
            # `type` is compared, because isinstance takes True for an int.
            if not all(type(x) is int for x in values):
                raise UserError(f"{folder / name}: eos_token_id is {value!r}: give a token's number, or a list of them")
            ids.update(values)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise UserError(f"{folder}: no eos_token_id in generation_config.json, config.json or the tokenizer: add one")
    return tuple(sorted(ids))


def load_params(
    folder: Path,
    model: Decoder,
    mesh: Mesh,
    *,
    learns: bool = True,
    parts: Collection[str] = (),
    unused: tuple[str, ...] = (),
    keep: Callable[[str, jax.Array], Any] = lambda path, leaf: leaf,
) -> PyTree:
    """Loads float32 parameters. Each shard is read directly from the file to its devices.

    learns: False for a model that never learns: its parameters have the dtypes of `Decoder.as_used`.
    parts: top names of the tree to load, () = all. unused: tensors of the folder that are not loaded here.
    keep(path, parameter): returns what to keep of a parameter.
    Raises: UserError, for a tensor that is missing, unknown or of the wrong shape, and for a broken file.
    """
    where = _index(folder)
    shapes = model.shapes
    table = _table_of(model.cfg.family, where)
    used = {name: file for name, file in where.items() if name not in unused}
    _check_tensors(folder, used, shapes, table)
    shapes = {name: part for name, part in shapes.items() if name in parts or not parts}

    def load(shown: progress.Task, path: Any, leaf: Any, dtype: Any) -> jax.Array:
        name = sharding.path_name(path)
        place = jax.NamedSharding(mesh, sharding.spec_for(name, leaf.shape, mesh))
        # Replicas read the same bytes: each part is read from the disk once, and copied to all devices that hold it.
        devices: dict[tuple[range, ...], list[Any]] = {}  # devices that have the same part
        for device, index in place.addressable_devices_indices_map(leaf.shape).items():
            spans = tuple(range(*s.indices(size)) for s, size in zip(index or (), leaf.shape, strict=True))
            devices.setdefault(spans, []).append(device)
        arrays = []
        # The host holds one part at a time.
        for spans, replicas in devices.items():
            axes = names.axes(name, table[name], len(spans) - names.stacked(table[name]))
            part = _read(folder, where, table[name], spans, dtype, axes)
            arrays += [jax.device_put(part, device) for device in replicas]
        shown.advance()
        return keep(name, jax.make_array_from_single_device_arrays(leaf.shape, place, arrays))

    dtypes = jax.tree.map(lambda x: x.dtype, shapes) if learns else model.used_dtypes(shapes)
    with progress.task(f"loading the tensors of {folder.name}", len(jax.tree.leaves(shapes))) as shown:
        return jax.tree_util.tree_map_with_path(partial(load, shown), shapes, dtypes)


def load_base(folder: Path, model: Decoder, mesh: Mesh, adapters: Adapters) -> PyTree:
    """Loads the parameters beside the adapters. Raises: UserError, as `load_params`."""

    def keep(path: str, leaf: jax.Array) -> Any:
        if path not in adapters.in_int8:
            return leaf
        # Rounded tensor by tensor while loading: the float kernels of all layers are never in memory together.
        place = sharding.shardings({path: jax.eval_shape(int8, leaf)}, mesh)[path]
        return jax.jit(int8, out_shardings=place)(leaf)

    return load_params(folder, model, mesh, learns=False, keep=keep)


def load_readout(folder: Path, model: Decoder) -> PyTree:
    """Loads the head of a model for sequence classification with one label: {"kernel": [D, 1], "bias": [1]}.

    Raises: UserError, if the folder has no such head.
    """
    where, name, shape = _index(folder), SCORE, (1, model.cfg.width)
    if name not in where:
        raise UserError(f"{folder}: no tensor {name}: give a model with a head for sequence classification")
    _check_dtype(folder, where, name)
    tensor = where[name].get_tensor(name)
    if tensor.shape != shape:
        raise UserError(f"{folder}: tensor {name} is {tensor.shape}, not {shape}: give a model with one label")
    _check_finite(folder, name, tensor)
    # The class for sequence classification of transformers has no bias.
    return {"kernel": tensor.astype(np.float32).T, "bias": np.zeros(1, np.float32)}


def has_readout(folder: Path) -> bool:
    """Whether the folder holds a model for sequence classification, whose head `load_readout` loads."""
    return SCORE in _index(folder)


def weight_files(folder: Path) -> list[Path]:
    """Weight files of the checkpoint: one file, or the files of its index. Other files are ignored.

    Raises: UserError, if there is no weight file or one is missing.
    """
    listing = "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / listing).is_file() and any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} holds no {listing}, which says where each tensor is: fetch it again")
    if not (folder / listing).is_file():
        raise UserError(f"{folder} {_merging(folder) or f'holds no model.safetensors: {_conversion(folder)}'}")
    files = [folder / name for name in sorted(set(read_config(folder, listing).get("weight_map", {}).values()))]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, and {listing} names it: fetch it again")
    return files


def _conversion(folder: Path) -> str:
    """Says how a folder gets its weights as safetensors."""
    # A folder of the hub's cache has only files of the formats that we asked for.
    if folder.parent.name == "snapshots":
        repo = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return (
            f"the hub has none of {repo}: fetch all of it (hf download {repo} --local-dir DIR) and give DIR; another "
            "line then says how to convert it"
        )
    if not any(file.suffix in (".bin", ".pt", ".pth") for file in folder.iterdir()):
        return "fetch the weights again"
    code = (
        f"from transformers import AutoModelForCausalLM as M; d = {json.dumps(str(folder), ensure_ascii=False)}; "
        'M.from_pretrained(d, dtype="auto").save_pretrained(d)'
    )
    return f"convert it where torch is installed: python -c {shlex.quote(code)}"


def _index(folder: Path) -> dict[str, Any]:
    """Maps each tensor name to the open file that holds it."""
    where = {}
    for file in weight_files(folder):
        try:
            # Maps the file: nothing is read before a slice is asked for.
            handle = safe_open(file, "np")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is broken or cut short ({error}): fetch it again") from None
        where.update(dict.fromkeys(handle.keys(), handle))
    return where


def _check_tensors(folder: Path, where: dict[str, Any], shapes: PyTree, table: TensorNames) -> None:
    expected = names.tensor_shapes(shapes, table)
    for tensor, shape in expected.items():
        if tensor not in where:
            raise UserError(f"{folder}: no tensor {tensor}, which config.json asks for: use one checkpoint's files")
        stored = tuple(where[tensor].get_slice(tensor).get_shape())
        _check_dtype(folder, where, tensor)
        if stored != shape:
            raise UserError(
                f"{folder}: tensor {tensor} is {stored}, config.json makes it {shape}: use one checkpoint's files"
            )
    # A copy of the tied head is harmless. Another head would be dropped, and the model would say something else.
    embedding = table["embed/embedding"]
    if HEAD in where and HEAD not in expected and not _equal(where, HEAD, embedding):
        raise UserError(
            f"{folder}: config.json ties the head to the embedding, but {HEAD} differs from {embedding}: "
            "set tie_word_embeddings to false in config.json"
        )
    # Older versions of transformers wrote both: a copy of a tied head, and constants of the rotary embedding.
    harmless = (HEAD, "rotary_emb.inv_freq")
    for tensor in sorted(where.keys() - expected.keys()):
        if not tensor.endswith(harmless):
            family = read_config(folder)["model_type"]
            raise UserError(f"{folder}: tensor {tensor} is unknown to {family}: use one checkpoint's files")


def _check_dtype(folder: Path, where: dict[str, Any], tensor: str) -> None:
    dtype = where[tensor].get_slice(tensor).get_dtype()
    if dtype not in (*DTYPES, "F64"):
        raise UserError(
            f"{folder}: tensor {tensor} is stored as {dtype}, and quantized weights are not supported: "
            "use the checkpoint that they were made from"
        )


def _equal(where: dict[str, Any], name: str, other_name: str) -> bool:
    """Whether two tensors of a vocabulary have the same numbers. Holds a few of their rows at a time."""
    a, b, rows = where[name].get_slice(name), where[other_name].get_slice(other_name), 2**14
    if a.get_shape() != b.get_shape():
        return False
    size = a.get_shape()[0]
    parts = (slice(start, min(start + rows, size)) for start in range(0, size, rows))
    return all(np.array_equal(a[part], b[part]) for part in parts)


def _read(
    folder: Path, where: dict[str, Any], form: str, spans: tuple[range, ...], dtype: Any, axes: tuple[int, ...]
) -> np.ndarray:
    """Reads the part `spans` of the parameter whose tensors are called `form`; axes: result of `names.axes`.

    Raises: UserError, for a number that is not finite.
    """
    part, stacked = np.empty([len(span) for span in spans], dtype), names.stacked(form)
    in_tensor = tuple(slice(span.start, span.stop) for span in spans[stacked:])
    for place in np.ndindex(*part.shape[:stacked]):
        tensor = form.format(*(span[i] for span, i in zip(spans, place, strict=False)))
        stored = where[tensor].get_slice(tensor)
        part[place] = stored[tuple(in_tensor[axis] for axis in axes)].transpose(axes)
        _check_finite(folder, tensor, part[place])
    return part


def _check_finite(folder: Path, tensor: str, values: np.ndarray) -> None:
    # Otherwise the self-test finds it, and says that the engine computes something else than the trainer.
    if not np.isfinite(values).all():
        file = next(file for file in weight_files(folder) if tensor in {*safe_open(file, "np").keys()})
        raise UserError(f"{file}: tensor {tensor} has numbers that are not finite: use another checkpoint")


def fingerprint(folder: Path) -> str:
    """Hash that tells models apart. For speed it reads only the SAMPLED bytes in the middle of each tensor."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in SETTINGS:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in weight_files(folder) if any(folder.glob("*.safetensors")) else []:
        with file.open("rb") as handle:
            header = handle.read(int.from_bytes(handle.read(8), "little"))
            digest.update(file.name.encode() + header)
            data = handle.tell()
            tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
            for start, stop in sorted(tensor["data_offsets"] for tensor in tensors):
                handle.seek(data + max(start, (start + stop - SAMPLED) // 2))
                digest.update(handle.read(min(stop - start, SAMPLED)))
    return digest.hexdigest()
