"""Finds and reads Hugging Face checkpoints: config.json, weights in safetensors, and the tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from jaxrl_llm.errors import MissingHere, UserError, check_local, describe
from jaxrl_llm.machine import bucket, progress, sharding
from jaxrl_llm.models import names
from jaxrl_llm.models.adapters import Adapters, quantize_int8
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.names import TensorNames
from jaxrl_llm.structs import PyTree

if TYPE_CHECKING:  # it takes a second, which a check of a config need not wait for
    from jaxrl_llm.models.decoder import Decoder

DESCRIPTION_ENDINGS, WEIGHT_ENDINGS = (
    (".json", ".jinja", ".txt", ".model"),
    (".safetensors",),
)  # file endings of a checkpoint
FINGERPRINT_BYTES = 2**16  # number of bytes of each tensor that a fingerprint reads
# Besides config.json and the weights, a fingerprint covers these files: they change the input tokens, the output text
# or the stop ids.
FINGERPRINTED_FILES = (
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
# Paths of the two kernels that hold all experts of a layer in one tensor.
FUSED_EXPERTS = ("layers/experts/gate_up/kernel", "layers/experts/down/kernel")
HEAD, SCORE = "lm_head.weight", "score.weight"  # heads of a language model, and of a reward or value model
HEADS = (HEAD, SCORE)
# {vision-language model whose config.json does not name its text family: this text family}.
TEXT_FAMILIES = {"internvl_chat": "qwen2", "mllama": "llama", "qwen2_5_omni": "qwen2"}
ADAPTER = "adapter_config.json"  # marks a folder that PEFT wrote
# Mean and standard deviation of the pixel channels in CLIP, which transformers uses where a file has none.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # {name in safetensors: name in config.json}


def is_hub_id(path: str) -> bool:
    """Returns whether `path` is a hub id, so it has the form org/name, and not an existing local path."""
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", path)) and not Path(path).expanduser().exists()


def find_checkpoint(path: str, field: str = "config.model.path", *, weights: bool = True) -> Path:
    """Returns the local folder of a checkpoint, after a download if `path` is a hub id or a bucket address.

    path: local folder, hub id or bucket address. field: config field or flag that errors name. weights: whether to
    download the weights too. Raises: UserError, if `path` has no checkpoint, or holds PEFT adapters.
    """
    check_local(field, path)
    if remote := bucket.address(path):
        folder = bucket.fetch_folder(
            field, remote, DESCRIPTION_ENDINGS + WEIGHT_ENDINGS, DESCRIPTION_ENDINGS + WEIGHT_ENDINGS * weights
        )
    else:
        folder = _download(path, field, weights=weights) if is_hub_id(path) else Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if (folder / ADAPTER).is_file():
        raise UserError(_adapter_error(folder, path, field))
    if remedy := _merge_remedy(folder):
        raise UserError(f"{field} = {path!r} {remedy}")
    error, problem = (UserError, "has no config.json") if folder.exists() else (MissingHere, "does not exist")
    raise error(
        f"{field} = {path!r}: the folder {problem}: set {field} to a Hugging Face folder or a hub id (org/name)"
    )


def find_local_checkpoint(path: str) -> Path | None:
    """Returns the local folder of a checkpoint without using the network; None for a hub id that is not cached."""
    # Imported here, because the import is slow and only hub ids need it.
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(path):
        return find_checkpoint(path, weights=False)
    file = try_to_load_from_cache(path, "config.json")
    return Path(file).parent if isinstance(file, str) else None


def _download(path: str, field: str, *, weights: bool) -> Path:
    """Downloads a checkpoint from the hub, or finds it in the hub's cache, and returns its folder."""
    # Imported here, because the import is slow and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # *.bin and *.pt are left out, because they are pickles, which can run code, and would double the download.
        patterns = [f"*{ending}" for ending in DESCRIPTION_ENDINGS + WEIGHT_ENDINGS * weights]
        return Path(snapshot_download(path, allow_patterns=patterns))
    # The hub raises many types, for no network, an unknown or a gated model. All of them concern the user.
    except Exception as error:
        remedy = f"download it on a machine with a network (hf download {path} --local-dir DIR), and set {field} to DIR"
        if isinstance(error, GatedRepoError):
            remedy = "ask for access on the model's page, and log in with a token (hf auth login, or HF_TOKEN)"
        elif isinstance(error, RepositoryNotFoundError):
            remedy = "check the name; for a private model, log in with a token (hf auth login, or HF_TOKEN)"
        problem = f"{field} = {path!r}: no such local folder, and the hub answers: {_first_line(error)}"
        raise UserError(f"{problem.rstrip('.: ')}: {remedy}") from error


def _adapter_error(folder: Path, path: str, field: str) -> str:
    """Returns the error message for a folder of PEFT adapters where a model is expected."""
    base = read_config(folder, ADAPTER).get("base_model_name_or_path") or "the model that it adapts"
    problem = f"{field} = {path!r}: the folder holds PEFT adapters ({ADAPTER}), but must hold a model"
    if field == "config.model.path":
        return f"{problem}: set model.path to their base, {base}, and adapters.path to this folder (configs/lora.py)"
    return f"{problem}: merge the adapters into their base, {base}, with PEFT (merge_and_unload), and use the result"


def _merge_remedy(folder: Path) -> str:
    """Returns how to merge the veRL FSDP shards in or beside a folder, as the end of an error; "" without shards."""
    for candidate in (folder, folder / "actor", folder.parent):
        if any(candidate.glob("model_world_size_*_rank_*.pt")):
            command = f"python -m verl.model_merger merge --backend fsdp --local_dir {shlex.quote(str(candidate))}"
            return f"holds the shards of veRL's FSDP workers: merge them with {command} --target_dir DIR, and use DIR"
    return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Returns the content of a folder's config.json, or of another JSON file. Raises: UserError, if it is no object."""
    try:
        settings = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / name} cannot be read ({error}): restore the file") from None
    if not isinstance(settings, dict):
        raise UserError(f"{folder / name} must hold a JSON object: restore the file")
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
    """Returns the decoder of a checkpoint folder, without its parameters.

    family: dotted name of a user's function for a model_type that this package lacks, "" = none. dtype, remat,
    row_parts: fields of `DecoderConfig`. Raises: UserError, for an unsupported family, quantization or dtype.
    """
    hf, family = read_config(folder), family_of(folder, family)
    if hf.get("quantization_config"):
        raise UserError(
            f"{folder / 'config.json'}: quantization_config is set, but quantized weights are not supported: use the "
            "checkpoint from which they were quantized"
        )
    _config_dtype(folder)
    cfg = replace(read_decoder_config(family, hf), dtype=dtype, remat=remat, row_parts=row_parts)
    if cfg.vision:
        mean, std = read_pixel_scale(folder)
        cfg = replace(cfg, vision=replace(cfg.vision, pixel_mean=mean, pixel_std=std))
    from jaxrl_llm.models.decoder import decoder_of

    return decoder_of(cfg, mesh)


def family_of(folder: Path, user_function: str = "") -> str:
    """Returns the family of a checkpoint folder: its `model_type` if this package has it, else `user_function`.

    user_function: dotted name of a user's function (`model.family`), "" = none. Raises: UserError, if this package
    lacks the model_type and there is no user function.
    """
    hf = read_config(folder)
    family = str(hf.get("model_type", ""))
    if family in (families := known_families()):
        return family
    if not user_function:
        raise UserError(f"{folder / 'config.json'}: model_type {family!r} {_unsupported_family(family, hf, families)}")
    return user_function


def read_decoder_config(family: str, hf: dict[str, Any]) -> DecoderConfig:
    """Returns the DecoderConfig that a family reads from the content of a config.json.

    family: module of this package, or dotted name of a user's function. Raises: UserError, if the family does not
    support the content, or the user's function fails.
    """
    try:
        cfg = names.family_function(family)(hf)
    except UserError:
        raise
    except Exception as error:
        if "." not in family:  # An error here is a bug of this package, so its traceback must be seen.
            raise
        raise UserError(
            f"config.model.family = {family!r}: the function raised {describe(error)}: correct it"
        ) from error
    if not isinstance(cfg, DecoderConfig):
        raise UserError(
            f"config.model.family = {family!r}: the function returned {cfg!r:.80}: let it return a DecoderConfig"
        )
    return replace(cfg, family=family) if "." in family else cfg


def read_image_processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file that holds the settings of a model's image processor, and the settings.

    processor_config.json, which transformers 5 writes, precedes preprocessor_config.json. Raises: UserError, if the
    folder has neither.
    """
    if (folder / PROCESSOR).is_file():
        nested = read_config(folder, PROCESSOR).get("image_processor")
        if isinstance(nested, dict):
            return folder / PROCESSOR, nested
    if not (folder / PREPROCESSOR).is_file():
        raise UserError(f"{folder} has no {PREPROCESSOR}, which holds the settings for images: restore the file")
    return folder / PREPROCESSOR, read_config(folder, PREPROCESSOR)


def read_pixel_scale(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation of each channel of pixels between 0 and 1.

    Raises: UserError, if they are not three numbers each, or pixels have another range.
    """
    file, settings = read_image_processor(folder)
    factor = settings.get("rescale_factor", 1 / 255)
    if not settings.get("do_rescale", True) or not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        raise UserError(f"{file}: rescale_factor is {factor!r}, but must be 1/255: restore the file")
    if not settings.get("do_normalize", True):
        return (0.0,) * 3, (1.0,) * 3
    pixel_scale: dict[str, tuple[float, ...]] = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    if str(settings.get("image_processor_type", "")).startswith("Gemma3"):
        pixel_scale = dict.fromkeys(pixel_scale, (0.5,) * 3)
    for name, default in pixel_scale.items():
        # transformers writes these settings only where they differ from the default.
        channel_numbers = settings.get(name) or default
        if (
            not isinstance(channel_numbers, list | tuple)
            or [type(x) in (int, float) for x in channel_numbers] != [True] * 3
        ):
            raise UserError(f"{file}: {name} is {channel_numbers!r}, but must be three numbers: restore the file")
        pixel_scale[name] = tuple(map(float, channel_numbers))
    return pixel_scale["image_mean"], pixel_scale["image_std"]


def tensor_table(folder: Path, family: str = "") -> TensorNames:
    """Returns {path of a parameter: name of its tensors} for a checkpoint folder.

    family: dotted name of a user's function for a model_type that this package lacks, "" = none. Raises: UserError, if
    a weight file is missing or broken.
    """
    return _folder_table(family_of(folder, family), _open_tensors(folder) if any(folder.glob("*.safetensors")) else {})


def _folder_table(family: str, tensor_files: dict[str, Any]) -> TensorNames:
    """Returns {path of a parameter: name of its tensors}. The name is a `SwappedAxes` if two axes are swapped."""
    table = names.matching_table(family, tensor_files)
    fused_templates = {
        path: template for path, template in table.items() if path in FUSED_EXPERTS and FUSED_EXPERTS[0] in table
    }
    fused_shapes = [
        tensor_files[name].get_slice(name).get_shape()
        for template in fused_templates.values()
        if (name := template.format(0)) in tensor_files
    ]
    # Files on the hub have the axes [width, expert widths] and [expert width, width]. transformers 5 writes the axes
    # swapped, as its modules have them. The position of the common width shows which form a file has.
    if len(fused_shapes) < len(FUSED_EXPERTS) or fused_shapes[0][1] == fused_shapes[1][2]:
        return table
    return {**table, **{path: names.SwappedAxes(template) for path, template in fused_templates.items()}}


def _unsupported_family(family: str, settings: dict[str, Any], families: list[str]) -> str:
    """Returns the end of the error for a model_type that this package lacks, with the models to use instead."""
    if family not in TEXT_FAMILIES and "vision_config" not in settings:
        remedy = (
            "use one of these, or set model.family to your own function that reads this config.json (docs/models.md)"
        )
        return f"is not supported. Supported: {', '.join(families)}: {remedy}"
    text_family = TEXT_FAMILIES.get(family) or (settings.get("text_config") or {}).get("model_type")
    text_model = f"of the family {text_family}" if text_family in families else f"of one of {', '.join(families)}"
    image_families = ", ".join(name for name in families if "_vl" in name or name == "gemma3")
    return (
        f"is an unsupported kind of vision-language model: use a model of one of {image_families}, or a text model "
        f"{text_model}"
    )


def stored_dtype(folder: Path, family: str = "") -> np.dtype:
    """Returns the dtype of the embedding in a folder, or the dtype in its config.json if it has no weights.

    family: dotted name of a user's function for a model_type that this package lacks, "" = none. Raises: UserError, if
    exports do not support the dtype.
    """
    name = _config_dtype(folder)
    embedding = tensor_table(folder, family)["embed/embedding"]
    if any(folder.glob("*.safetensors")) and (file := _open_tensors(folder).get(embedding)):
        name = DTYPES.get(file.get_slice(embedding).get_dtype(), name)
    return jax.numpy.dtype(name)


def _config_dtype(folder: Path) -> str:
    """Returns the dtype in config.json. Raises: UserError, if exports do not support it."""
    hf = read_config(folder)
    # Later versions of transformers write dtype, earlier ones torch_dtype.
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES.values():
        raise UserError(
            f"{folder / 'config.json'}: dtype is {name!r}, but must be 'float32', 'bfloat16' or 'float16': use "
            "another checkpoint"
        )
    return name


def known_families() -> list[str]:
    """Returns the model families of this package: the modules with a function `decoder_config`."""
    package = Path(__file__).parent
    return sorted(f.stem for f in package.glob("*.py") if "\ndef decoder_config(" in f.read_text(encoding="utf-8"))


def load_tokenizer(folder: Path) -> Any:
    """Loads the folder's tokenizer, exactly as tokenizer.json defines it.

    AutoTokenizer is only the fallback, for folders without tokenizer.json. For a Qwen config.json, AutoTokenizer splits
    text by Qwen's rules, so a model with another tokenizer, such as a distilled one, would get wrong token ids.
    Raises: UserError, if the folder has no tokenizer, or an incomplete one.
    """
    import transformers

    # An access to AutoTokenizer imports PyTorch where it is installed, for two seconds.
    is_fast = (folder / "tokenizer.json").is_file()
    tokenizer_class = transformers.PreTrainedTokenizerFast if is_fast else transformers.AutoTokenizer
    try:
        tokenizer = tokenizer_class.from_pretrained(str(folder))
    # transformers raises many types here, and all of them concern the folder's files.
    except Exception as error:
        raise UserError(
            f"{folder}: the tokenizer cannot be loaded ({_first_line(error)}): restore tokenizer.json"
        ) from error
    # transformers returns a tokenizer without vocabulary where files are missing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
        raise UserError(f"{folder}: the tokenizer has no vocabulary: restore tokenizer.json")
    # Any id can serve as padding, because padding is neither attended to nor scored.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Returns the token ids that end a completion, from generation_config.json, config.json and the tokenizer.

    Raises: UserError, if none of the three has one, because completions would never end, or if the model has no such
    token.
    """
    # All three are read, because a chat model's end of turn is often in generation_config.json alone.
    token_ids, vocabulary_size = set[int](), _vocabulary_size(folder)
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            settings = read_config(folder, name)
            # A vision-language model may have eos_token_id in text_config.
            value = settings.get("eos_token_id", (settings.get("text_config") or {}).get("eos_token_id"))
            values = value if isinstance(value, list) else [] if value is None else [value]
            # `type` is compared, because isinstance takes True for an int.
            if not all(type(x) is int for x in values):
                raise UserError(
                    f"{folder / name}: eos_token_id is {value!r}, but must be a token id or a list of token ids: "
                    "correct the file"
                )
            size = vocabulary_size or max(values, default=0) + 1
            if values and not 0 <= min(values) <= max(values) < size:
                raise UserError(
                    f"{folder / name}: eos_token_id is {value!r}, but the model has the tokens 0 to {size - 1}: "
                    "correct the file"
                )
            token_ids.update(values)
    if tokenizer.eos_token_id is not None:
        token_ids.add(tokenizer.eos_token_id)
    if not token_ids:
        raise UserError(
            f"{folder}: generation_config.json, config.json and the tokenizer lack eos_token_id: add it to "
            "generation_config.json"
        )
    return tuple(sorted(token_ids))


def _vocabulary_size(folder: Path) -> int | None:
    """Returns `vocab_size` of config.json, which may be in text_config; None if the file does not say it."""
    settings = read_config(folder, "config.json") if (folder / "config.json").is_file() else {}
    size = (settings | (settings.get("text_config") or {})).get("vocab_size")
    return size if isinstance(size, int) else None


def load_params(
    folder: Path,
    model: Decoder,
    mesh: Mesh,
    *,
    learns: bool = True,
    parts: Collection[str] = (),
    unused: tuple[str, ...] = (),
    transform: Callable[[str, jax.Array], Any] = lambda path, leaf: leaf,
) -> PyTree:
    """Loads a checkpoint's parameters, each shard directly from the file to its devices.

    learns: whether the model learns; its parameters are then float32, else they have the dtypes of
    `Decoder.cast_for_compute`. parts: top names of the parameter tree to load, () = all. unused: names of tensors in
    the folder that are not loaded. transform(path, parameter): returns the value that takes the parameter's place in
    the tree. Raises: UserError, for a tensor that is missing, unknown or of the wrong shape, and for a broken file.
    """
    tensor_files = _open_tensors(folder)
    shapes = model.shapes
    table = _folder_table(model.cfg.family, tensor_files)
    loaded_files = {name: file for name, file in tensor_files.items() if name not in unused}
    _check_tensors(folder, loaded_files, shapes, table)
    shapes = {name: part for name, part in shapes.items() if name in parts or not parts}

    def load(progress_bar: progress.Task, path: Any, shape_leaf: Any, dtype: Any) -> jax.Array:
        """Loads one parameter. shape_leaf: its shape. dtype: its dtype on the devices."""
        name = sharding.path_name(path)
        leaf_sharding = jax.NamedSharding(mesh, sharding.spec_for(name, shape_leaf.shape, mesh))
        # Each part is read from the disk once, and copied to all devices that hold this part.
        devices: dict[tuple[range, ...], list[Any]] = {}  # {part of the parameter: devices that hold it}
        for device, index in leaf_sharding.addressable_devices_indices_map(shape_leaf.shape).items():
            index_ranges = tuple(range(*s.indices(size)) for s, size in zip(index or (), shape_leaf.shape, strict=True))
            devices.setdefault(index_ranges, []).append(device)
        arrays = []
        # The parts are read one by one, so that the host holds only one part at a time.
        for index_ranges, replicas in devices.items():
            axes = names.tensor_axes(name, table[name], len(index_ranges) - names.stacked_axes(table[name]))
            values = _read_part(
                folder=folder,
                tensor_files=tensor_files,
                template=table[name],
                index_ranges=index_ranges,
                dtype=dtype,
                axes=axes,
            )
            arrays += [jax.device_put(values, device) for device in replicas]
        progress_bar.advance()
        return transform(name, jax.make_array_from_single_device_arrays(shape_leaf.shape, leaf_sharding, arrays))

    dtypes = jax.tree.map(lambda x: x.dtype, shapes) if learns else model.compute_dtypes(shapes)
    with progress.task(f"loading the tensors of {folder.name}", len(jax.tree.leaves(shapes))) as progress_bar:
        return jax.tree_util.tree_map_with_path(partial(load, progress_bar), shapes, dtypes)


def load_base(folder: Path, model: Decoder, mesh: Mesh, adapters: Adapters) -> PyTree:
    """Loads the frozen base of a model with adapters; some kernels become int8. Raises: UserError, as `load_params`."""

    def quantize(path: str, leaf: jax.Array) -> Any:
        if path not in adapters.int8_paths:
            return leaf
        # Each kernel is quantized when it is loaded, so that the float kernels are never all in memory.
        place = sharding.shardings({path: jax.eval_shape(quantize_int8, leaf)}, mesh)[path]
        return jax.jit(quantize_int8, out_shardings=place)(leaf)

    return load_params(folder, model, mesh, learns=False, transform=quantize)


def load_readout(folder: Path, model: Decoder) -> PyTree:
    """Loads the head of a sequence classification model with one label: {"kernel": [D, 1], "bias": [1]}.

    Raises: UserError, if the folder has no such head.
    """
    tensor_files, name, shape = _open_tensors(folder), SCORE, (1, model.cfg.width)
    if name not in tensor_files:
        raise UserError(f"{folder} has no tensor {name}: use a model with a sequence classification head")
    _check_dtype(folder, tensor_files, name)
    tensor = tensor_files[name].get_tensor(name)
    if tensor.shape != shape:
        raise UserError(
            f"{folder}: tensor {name} has the shape {tensor.shape}, but must have {shape}: use a model with one label"
        )
    _check_finite(folder, name, tensor)
    # The bias is 0, because the head of transformers' sequence classification models has none.
    return {"kernel": tensor.astype(np.float32).T, "bias": np.zeros(1, np.float32)}


def has_readout(folder: Path) -> bool:
    """Returns whether the folder holds a sequence classification model, whose head `load_readout` loads."""
    return SCORE in _open_tensors(folder)


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a checkpoint: model.safetensors, or the files that its index names.

    Raises: UserError, if a weight file or the index is missing.
    """
    index_name = "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / index_name).is_file() and any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no {index_name}, which names the file of each tensor: download it again")
    if not (folder / index_name).is_file():
        if merge_remedy := _merge_remedy(folder):
            raise UserError(f"{folder} {merge_remedy}")
        raise UserError(f"{folder} has no model.safetensors: {_conversion_remedy(folder)}")
    files = [folder / name for name in sorted(set(read_config(folder, index_name).get("weight_map", {}).values()))]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, but {index_name} names it: download it again")
    return files


def _conversion_remedy(folder: Path) -> str:
    """Returns how the user gets weights in safetensors for a folder that has none."""
    # A folder of the hub's cache has no other formats, because the download asks only for safetensors.
    if folder.parent.name == "snapshots":
        repo = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return (
            f"the hub's {repo} has no safetensors: download all its files (hf download {repo} --local-dir DIR) and "
            "use DIR; the next error message then tells how to convert them"
        )
    if not any(file.suffix in (".bin", ".pt", ".pth") for file in folder.iterdir()):
        return "download the weights again"
    code = (
        f"from transformers import AutoModelForCausalLM as M; d = {json.dumps(str(folder), ensure_ascii=False)}; "
        'M.from_pretrained(d, dtype="auto").save_pretrained(d)'
    )
    return f"convert the weights in an environment with torch: python -c {shlex.quote(code)}"


def _open_tensors(folder: Path) -> dict[str, Any]:
    """Maps each tensor name to the open file that holds it."""
    tensor_files = {}
    for file in weight_files(folder):
        try:
            # safe_open maps the file into memory, and reads nothing before a slice is requested.
            open_file = safe_open(file, "np")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged or incomplete ({error}): download it again") from None
        tensor_files.update(dict.fromkeys(open_file.keys(), open_file))
    return tensor_files


def _check_tensors(folder: Path, tensor_files: dict[str, Any], shapes: PyTree, table: TensorNames) -> None:
    """Checks that the files have exactly the tensors that config.json requires. Raises: UserError, naming a tensor."""
    expected = names.tensor_shapes(shapes, table)
    for tensor, shape in expected.items():
        if tensor not in tensor_files:
            raise UserError(
                f"{folder} lacks the tensor {tensor}, which config.json requires: use the config.json and the "
                "weights of one checkpoint"
            )
        stored_shape = tuple(tensor_files[tensor].get_slice(tensor).get_shape())
        _check_dtype(folder, tensor_files, tensor)
        if stored_shape != shape:
            raise UserError(
                f"{folder}: tensor {tensor} has the shape {stored_shape}, but config.json requires {shape}: use the "
                "config.json and the weights of one checkpoint"
            )
    # A copy of a tied head is ignored. A different head must not be, because the model's outputs would change.
    embedding = table["embed/embedding"]
    if HEAD in tensor_files and HEAD not in expected and not _same_numbers(tensor_files, HEAD, embedding):
        raise UserError(
            f"{folder}: config.json ties the head to the embedding, but {HEAD} differs from {embedding}: set "
            "tie_word_embeddings to false in config.json"
        )
    # Older versions of transformers also wrote a copy of a tied head, and constants of the rotary embedding.
    ignored_endings = (HEAD, "rotary_emb.inv_freq")
    for tensor in sorted(tensor_files.keys() - expected.keys()):
        if not tensor.endswith(ignored_endings):
            family = read_config(folder)["model_type"]
            raise UserError(
                f"{folder}: the family {family} has no tensor {tensor}: use the config.json and the weights of one "
                "checkpoint"
            )


def _check_dtype(folder: Path, tensor_files: dict[str, Any], tensor: str) -> None:
    """Raises: UserError, if a tensor is quantized."""
    dtype = tensor_files[tensor].get_slice(tensor).get_dtype()
    if dtype not in (*DTYPES, "F64"):
        raise UserError(
            f"{folder}: tensor {tensor} is stored as {dtype}, but quantized weights are not supported: use the "
            "checkpoint from which they were quantized"
        )


def _same_numbers(tensor_files: dict[str, Any], name: str, other_name: str) -> bool:
    """Returns whether two tensors have the same values. Reads a part of their rows at a time, to save memory."""
    first_tensor, second_tensor = (
        tensor_files[tensor_name].get_slice(tensor_name) for tensor_name in (name, other_name)
    )
    rows_at_a_time = 2**14
    if first_tensor.get_shape() != second_tensor.get_shape():
        return False
    size = first_tensor.get_shape()[0]
    parts = (slice(start, min(start + rows_at_a_time, size)) for start in range(0, size, rows_at_a_time))
    return all(np.array_equal(first_tensor[part], second_tensor[part]) for part in parts)


def _read_part(
    folder: Path,
    tensor_files: dict[str, Any],
    template: str,
    index_ranges: tuple[range, ...],
    dtype: Any,
    axes: tuple[int, ...],
) -> np.ndarray:
    """Reads one part of a parameter from the files.

    template: name of the parameter's tensors, with {} for the layer and the expert. index_ranges: range of the part in
    each axis of the parameter. axes: result of `names.tensor_axes`. Raises: UserError, for an infinite or NaN value.
    """
    values, stacked_axes = (
        np.empty([len(index_range) for index_range in index_ranges], dtype),
        names.stacked_axes(template),
    )
    in_tensor = tuple(slice(index_range.start, index_range.stop) for index_range in index_ranges[stacked_axes:])
    for stack_index in np.ndindex(*values.shape[:stacked_axes]):
        tensor = template.format(*(index_range[i] for index_range, i in zip(index_ranges, stack_index, strict=False)))
        file_tensor = tensor_files[tensor].get_slice(tensor)
        values[stack_index] = file_tensor[tuple(in_tensor[axis] for axis in axes)].transpose(axes)
        _check_finite(folder, tensor, values[stack_index])
    return values


def _check_finite(folder: Path, tensor: str, values: np.ndarray) -> None:
    """Raises: UserError, naming the file, if a tensor has an infinite or NaN value."""
    # Check here, because the self-test would only report that engine and trainer disagree.
    if not np.isfinite(values).all():
        file = next(file for file in weight_files(folder) if tensor in {*safe_open(file, "np").keys()})
        raise UserError(f"{file}: tensor {tensor} has infinite or NaN values: use another checkpoint")


def fingerprint(folder: Path) -> str:
    """Returns a hash that differs between models. To be fast, it reads only FINGERPRINT_BYTES of each tensor."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in FINGERPRINTED_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in weight_files(folder) if any(folder.glob("*.safetensors")) else []:
        with file.open("rb") as open_file:
            header = open_file.read(int.from_bytes(open_file.read(8), "little"))
            digest.update(file.name.encode() + header)
            data_start = open_file.tell()
            tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
            for start, stop in sorted(tensor["data_offsets"] for tensor in tensors):
                open_file.seek(data_start + max(start, (start + stop - FINGERPRINT_BYTES) // 2))
                digest.update(open_file.read(min(stop - start, FINGERPRINT_BYTES)))
    return digest.hexdigest()
