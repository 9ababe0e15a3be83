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

from shoal.serve.unknown_fields import Reading

MAX_FIELDS = 128
TOO_MANY_FIELDS = "too_many_fields"
UNION_TAG = "union:"
"""Begins names of branches of unions, which are no fields."""


class StrictModel(BaseModel):
    """Accepts only the declared fields, with exactly the declared types; 1.0 is an integer as well.

    Where the body of a request is read, unknown fields are ignored that can do no harm.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )
    limits_output: ClassVar[bool] = False
    """Whether no unknown field is ignored, since it may say what the output has to be like."""
    asks_for_text: ClassVar[bool] = False
    """Whether it has fields that say how text is generated."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """What other servers call fields, and their names here."""

    @model_validator(mode="before")
    @classmethod
    def _know_fields(cls, sent: Any, info: ValidationInfo) -> Any:
        if not isinstance(sent, dict):
            return sent
        # Each unknown field would make an error of its own, and only one error is reported.
        if len(sent) > MAX_FIELDS:
            raise PydanticCustomError(TOO_MANY_FIELDS, f"{len(sent)} fields, at most {MAX_FIELDS} are read")
        fields = info.context.known(cls, sent) if isinstance(info.context, Reading) else sent
        return fields | {name: whole(fields[name]) for name in cls.integer_names() & fields.keys()}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema, which allows unknown fields where they may be ignored."""
        schema = handler(core_schema)
        if not cls.limits_output:
            handler.resolve_ref_schema(schema).pop("additionalProperties", None)
        return schema

    @classmethod
    @cache
    def integer_names(cls) -> frozenset[str]:
        """Names of the fields that are integers, or lists of these."""
        fields = cls.model_fields.items()
        return frozenset(field.alias or name for name, field in fields if _has_integers(field.annotation))

    @classmethod
    @cache
    def known_names(cls) -> frozenset[str]:
        """Names of the fields."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    @cache
    def named_with_effect(cls) -> frozenset[str]:
        """Names of the fields that are not ignored, and other servers' names of them."""
        names = {
            field.alias or name
            for name, field in cls.model_fields.items()
            if not (field.description or "").startswith("Ignored")
        }
        return frozenset(names | cls.other_names.keys())

    @classmethod
    def refused_names(cls) -> Collection[str]:
        """Further names that are not ignored."""
        return ()

    @classmethod
    def unsupported(cls) -> dict[str, str]:
        """Fields that accept only neutral values, each with what to do instead, as its description says."""
        described = {
            field.alias or name: " ".join((field.description or "").split())
            for name, field in cls.model_fields.items()
        }
        return {
            name: description.partition(": ")[2].rstrip(".") or "leave it out"
            for name, description in described.items()
            if description.startswith("Not supported")
        }


def whole(value: Any) -> Any:
    """``value`` with integers for floats without a fraction, also in lists: JSON has one type for both."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # Prompts are long lists of integers: they are looked through only where they have something else.
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [whole(entry) for entry in value]
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
