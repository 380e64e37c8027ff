// SPDX-License-Identifier: Apache-2.0
//
// The keys of blocks as calls take them: objects of Python one by one, or packed in one piece of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "../python/object.hpp"

namespace flexkv::index {

using python::Items;
using python::own;
using python::PythonError;
using python::Reference;
using python::share;

using KeyView = std::string_view;

// The bytes of a key, which live as long as the object. Throws PythonError if it is no key.
KeyView view_of(PyObject* key);

// Makes the hashes of an index differ from those of others: clients cannot choose keys that collide.
struct HashSeed {
  std::uint64_t values[3];

  static HashSeed random();
};

// A hash of all bytes.
Py_hash_t hash_of(KeyView key, const HashSeed& seed) noexcept;

// The keys of a `PackedKeys`, or of what Python can iterate over. Throws PythonError.
class Keys {
 public:
  explicit Keys(PyObject* object);

  Py_ssize_t size() const noexcept { return size_; }

  // Valid as long as this object. Throws PythonError if it is no key.
  KeyView operator[](Py_ssize_t i) const {
    if (packed_ == nullptr) {
      return view_of((*items_)[i]);
    }
    return {packed_ + static_cast<std::size_t>(i) * width_, width_};
  }

  // The key as an object of Python. Throws PythonError.
  Reference object(Py_ssize_t i) const;

  // All keys in a list or a tuple. Throws PythonError.
  Reference sequence() const;

 private:
  Reference holder_;              // of the packed keys, or null
  std::unique_ptr<Items> items_;  // the keys, unless they are packed
  const char* packed_ = nullptr;
  std::size_t width_ = 0;
  Py_ssize_t size_ = 0;
};

// The type flexkv.types.packed_keys.PackedKeys. Throws PythonError.
Reference make_packed_keys_type();

}  // namespace flexkv::index
