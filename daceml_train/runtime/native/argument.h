// Fits the arguments of a boxed call to the operator's schema, once, when the plan is built.
#pragma once

#include <string>

#include <ATen/ScalarOps.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace daceml {

inline std::string place(const c10::FunctionSchema& schema, size_t position) {
  return "argument " + std::to_string(position) + " '" + schema.arguments()[position].name() + "' of " +
         toString(schema.operator_name());
}

inline c10::TypePtr without_optional(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::OptionalType ? type->expectRef<c10::OptionalType>().getElementType() : type;
}

inline bool matches(const c10::IValue& value, const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::NumberType ? value.isScalar() : value.type()->isSubtypeOf(*type);
}

// Python writes `[]`, `[1, 2]` and `1` where a schema may want other lists: they are rebuilt with its element type.
inline c10::IValue coerce_list(const c10::IValue& value, const c10::TypePtr& element, std::optional<int32_t> length,
                               const std::string& where) {
  c10::impl::GenericList list(element);
  const auto append = [&](const c10::IValue& item) {
    const bool widen = element->kind() == c10::TypeKind::FloatType && item.isInt();
    const c10::IValue fitted = widen ? c10::IValue(static_cast<double>(item.toInt())) : item;
    TORCH_CHECK_VALUE(matches(fitted, element), where, " is a list of ", element->str(), ", given ", item.type()->str());
    list.push_back(fitted);
  };
  if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) append(item);
  } else {
    for (int32_t i = 0; i < length.value_or(1); ++i) append(value);
  }
  return list;
}

// The value as the schema wants it. Throws c10::ValueError that names the argument.
inline c10::IValue coerce(const c10::IValue& value, const c10::FunctionSchema& schema, size_t position) {
  const c10::Argument& argument = schema.arguments()[position];
  const c10::TypePtr type = without_optional(argument.type());
  if (value.isNone()) {
    TORCH_CHECK_VALUE(argument.type()->kind() == c10::TypeKind::OptionalType || type->kind() == c10::TypeKind::NoneType,
                      place(schema, position), " must not be None");
    return value;
  }
  c10::IValue fitted = value;
  switch (type->kind()) {
    case c10::TypeKind::FloatType:
      if (value.isInt()) fitted = static_cast<double>(value.toInt());
      break;
    case c10::TypeKind::IntType:
      if (value.isBool()) fitted = static_cast<int64_t>(value.toBool());
      break;
    case c10::TypeKind::TensorType:
      if (value.isScalar()) fitted = at::native::wrapped_scalar_tensor(value.toScalar());
      break;
    case c10::TypeKind::ListType:
      fitted = coerce_list(value, type->expectRef<c10::ListType>().getElementType(), argument.N(),
                           place(schema, position));
      break;
    default:
      break;
  }
  TORCH_CHECK_VALUE(matches(fitted, type), place(schema, position), " wants ", argument.type()->str(), ", given ",
                    value.type()->str());
  return fitted;
}

}  // namespace daceml
