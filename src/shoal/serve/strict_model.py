"""The base of all request bodies: strict types, unknown fields, and the values of fields that must be off.

Fields that never change a response are ignored, and their descriptions begin with "Ignored". Fields that are
not implemented accept only the values that turn them off. Their descriptions begin with "Not supported", and
other values are rejected with this text.
"""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from shoal.serve.unknown_fields import ParsingContext

MAX_FIELDS = 128
TOO_MANY_FIELDS = "too_many_fields"
UNION_TAG = "union:"
"""Prefix of the names of union branches in pydantic's error locations."""


class StrictModel(BaseModel):
    """Accepts only declared fields, with exactly the declared types; 1.0 is an integer as well.

    With a ``ParsingContext``, harmless unknown fields are ignored.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )
    limits_output: ClassVar[bool] = False
    """Whether the object constrains the output, so that no unknown field is ignored."""
    generates_text: ClassVar[bool] = False
    """Whether the object has fields about text generation."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other servers' names of fields, with our names."""

    @model_validator(mode="before")
    @classmethod
    def _filter_fields(cls, sent: Any, info: ValidationInfo) -> Any:
        if not isinstance(sent, dict):
            return sent
        # Each unknown field would produce an error, and only one error is reported.
        if len(sent) > MAX_FIELDS:
            raise PydanticCustomError(TOO_MANY_FIELDS, f"{len(sent)} fields, at most {MAX_FIELDS} are read")
        context = info.context
        fields = context.filter_fields(cls, sent) if isinstance(context, ParsingContext) else sent
        return fields | {name: _whole_as_int(fields[name]) for name in cls.integer_names() & fields.keys()}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema, which allows unknown fields where they are ignored."""
        schema = handler(core_schema)
        if not cls.limits_output:
            handler.resolve_ref_schema(schema).pop("additionalProperties", None)
        return schema

    @classmethod
    @cache
    def integer_names(cls) -> frozenset[str]:
        """Names of the fields that are integers, or lists of integers."""
        fields = cls.model_fields.items()
        return frozenset(field.alias or name for name, field in fields if _has_integers(field.annotation))

    @classmethod
    @cache
    def known_names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    @cache
    def effective_names(cls) -> frozenset[str]:
        """Names and aliases of the fields that are not ignored."""
        names = {
            field.alias or name
            for name, field in cls.model_fields.items()
            if not (field.description or "").startswith("Ignored")
        }
        return frozenset(names | cls.aliases.keys())

    @classmethod
    def refused_names(cls) -> Collection[str]:
        """Names of unknown fields that are refused rather than ignored."""
        return ()

    @classmethod
    def unsupported(cls) -> dict[str, str]:
        """Fields that must be off, each with the alternative from its description."""
        described = {
            field.alias or name: " ".join((field.description or "").split())
            for name, field in cls.model_fields.items()
        }
        return {
            name: description.partition(": ")[2].rstrip(".") or "leave it out"
            for name, description in described.items()
            if description.startswith("Not supported")
        }


def _whole_as_int(value: Any) -> Any:
    """``value`` with whole floats as integers, also in lists: JSON has one number type."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # Prompts are long lists of integers: rebuild only lists that contain something else.
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [_whole_as_int(entry) for entry in value]
    return value


def _has_integers(annotation: Any) -> bool:
    return annotation is int or any(map(_has_integers, get_args(annotation)))


def _must_be_false(value: bool) -> bool:
    # Literal[False] would accept 0 as well.
    if value:
        raise PydanticCustomError("must_be_false", "Must be false")
    return value


def _must_be_true(value: bool) -> bool:
    if not value:
        raise PydanticCustomError("must_be_true", "Must be true")
    return value


NotTrue = Annotated[bool, AfterValidator(_must_be_false), WithJsonSchema({"const": False})]
NotFalse = Annotated[bool, AfterValidator(_must_be_true), WithJsonSchema({"const": True})]
EmptyList = Annotated[list[Any], Field(max_length=0)]
EmptyDict = Annotated[dict[str, Any], Field(max_length=0)]
Ignored = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS), AfterValidator(lambda sent: {})]
