// SPDX-License-Identifier: Apache-2.0
#include "keys.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>

#include "../python/calls.hpp"

namespace flexkv::index {

namespace {

using python::erased;
using python::guarded;
using python::need_arguments;

PyTypeObject* packed_type = nullptr;

// Keys of one width in a row. Slices share the memory.
struct Packed {
  PyObject_HEAD
  PyObject* data;  // owned; bytes, which nothing changes once the object is made
  Py_ssize_t first;
  Py_ssize_t count;
  Py_ssize_t width;

  const char* begin() const noexcept { return PyBytes_AsString(data) + first * width; }
};

Packed* packed_of(PyObject* object) noexcept { return reinterpret_cast<Packed*>(object); }

Reference make_packed(PyObject* data, Py_ssize_t first, Py_ssize_t count, Py_ssize_t width) {
  Reference made = own(PyType_GenericAlloc(packed_type, 0));
  Packed& packed = *packed_of(made.get());
  Py_INCREF(data);
  packed.data = data;
  packed.first = first;
  packed.count = count;
  packed.width = width;
  return made;
}

// Sixteen hexadecimal digits, and the eight bytes that they stand for. The compiler makes of these types
// what the processor has.
using Digits = std::uint8_t __attribute__((vector_size(16)));
using Pairs = std::uint16_t __attribute__((vector_size(16)));
using Bytes = std::uint8_t __attribute__((vector_size(8)));

// Decodes `Size` bytes, at most eight. Sets the bits of `wrong` where a character is no digit.
template <std::size_t Size>
void decode_next(const char* hex, char* out, Digits& wrong) noexcept {
  Digits digits = Digits{} + '0';
  std::memcpy(&digits, hex, 2 * Size);
  const Digits number = digits - '0';
  const Digits letter = (digits | 0x20) - 'a';
  const auto is_number = reinterpret_cast<Digits>(number <= 9);
  const auto is_letter = reinterpret_cast<Digits>(letter <= 5);
  const auto pairs =
      reinterpret_cast<Pairs>((number & is_number) | ((letter + 10) & is_letter));
  const Bytes bytes = __builtin_convertvector(pairs << 4 | pairs >> 8, Bytes);
  std::memcpy(out, &bytes, Size);
  wrong |= ~(is_number | is_letter);
}

// Decodes `size` bytes. Returns false if a character is no hexadecimal digit.
bool decode(const char* hex, char* out, std::size_t size) noexcept {
  constexpr std::size_t kAtOnce = 8;
  Digits wrong{};
  std::size_t i = 0;
  for (; i + kAtOnce <= size; i += kAtOnce) {
    decode_next<kAtOnce>(hex + 2 * i, out + i, wrong);
  }
  for (; i < size; ++i) {
    decode_next<1>(hex + 2 * i, out + i, wrong);
  }
  std::uint64_t halves[2];
  std::memcpy(halves, &wrong, sizeof(halves));
  return (halves[0] | halves[1]) == 0;
}

constexpr Py_ssize_t kAhead = 8;  // hashes whose memory is fetched while others are decoded; not tuned
constexpr std::ptrdiff_t kCacheLine = 64;

[[noreturn]] void no_hash(PyObject* hash) {
  PyErr_Format(PyExc_ValueError, "a hash is %R; allowed: hexadecimal digits, as many as others have",
               hash);
  throw PythonError{};
}

// PackedKeys(hashes, end)
PyObject* make(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject* hashes = nullptr;
  const char* end = nullptr;
  Py_ssize_t end_size = 0;
  if (PyArg_ParseTuple(args, "Oy#", &hashes, &end, &end_size) == 0) {
    return nullptr;
  }
  return guarded([&] {
    const Items items(hashes);
    Py_ssize_t size = 0;
    if (items.size() > 0 && PyUnicode_AsUTF8AndSize(items[0], &size) == nullptr) {
      throw PythonError{};
    }
    const Py_ssize_t width = size / 2 + end_size;
    const Reference data = own(PyBytes_FromStringAndSize(nullptr, items.size() * width));
    char* out = PyBytes_AsString(data.get());
    for (Py_ssize_t i = 0; i < items.size(); ++i) {
      if (i + kAhead < items.size()) {
        const auto* const next = reinterpret_cast<const char*>(items[i + kAhead]);
        __builtin_prefetch(next);
        __builtin_prefetch(next + kCacheLine);
      }
      Py_ssize_t digits = 0;
      const char* const hex = PyUnicode_AsUTF8AndSize(items[i], &digits);
      if (hex == nullptr) {
        throw PythonError{};
      }
      if (digits != size || digits % 2 != 0 || !decode(hex, out, static_cast<std::size_t>(digits / 2))) {
        no_hash(items[i]);
      }
      std::memcpy(out + size / 2, end, static_cast<std::size_t>(end_size));
      out += width;
    }
    return make_packed(data.get(), 0, items.size(), width);
  });
}

void destroy(PyObject* self) noexcept {
  PyTypeObject* const type = Py_TYPE(self);
  Py_XDECREF(packed_of(self)->data);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

Py_ssize_t length(PyObject* self) { return packed_of(self)->count; }

Reference key_at(const Packed& keys, Py_ssize_t i) {
  return own(PyBytes_FromStringAndSize(keys.begin() + i * keys.width, keys.width));
}

PyObject* item(PyObject* self, Py_ssize_t i) {
  const Packed& keys = *packed_of(self);
  if (i < 0 || i >= keys.count) {
    PyErr_SetString(PyExc_IndexError, "no such key");
    return nullptr;
  }
  return guarded([&] { return key_at(keys, i); });
}

PyObject* subscript(PyObject* self, PyObject* index) {
  const Packed& keys = *packed_of(self);
  return guarded([&] {
    if (PySlice_Check(index) == 0) {
      const Py_ssize_t i = PyNumber_AsSsize_t(index, PyExc_IndexError);
      if (i == -1 && PyErr_Occurred() != nullptr) {
        throw PythonError{};
      }
      return own(item(self, i < 0 ? i + keys.count : i));
    }
    Py_ssize_t start = 0;
    Py_ssize_t stop = 0;
    Py_ssize_t step = 0;
    if (PySlice_Unpack(index, &start, &stop, &step) != 0) {
      throw PythonError{};
    }
    const Py_ssize_t count = PySlice_AdjustIndices(keys.count, &start, &stop, step);
    if (step != 1) {
      PyErr_SetString(PyExc_ValueError, "a slice of keys has a step; allowed: 1");
      throw PythonError{};
    }
    return make_packed(keys.data, keys.first + start, count, keys.width);
  });
}

// The keys of `self` followed by those of `other`.
PyObject* concat(PyObject* self, PyObject* other) {
  return guarded([&] {
    if (Py_TYPE(other) != packed_type) {
      PyErr_Format(PyExc_TypeError, "%R are no packed keys", other);
      throw PythonError{};
    }
    const Packed& head = *packed_of(self);
    const Packed& tail = *packed_of(other);
    if (head.count == 0 || tail.count == 0) {
      return share(head.count == 0 ? other : self);
    }
    if (head.width != tail.width) {
      PyErr_Format(PyExc_ValueError, "keys of %zd and of %zd bytes", head.width, tail.width);
      throw PythonError{};
    }
    const Py_ssize_t count = head.count + tail.count;
    const Reference data = own(PyBytes_FromStringAndSize(nullptr, count * head.width));
    char* const out = PyBytes_AsString(data.get());
    const auto size = static_cast<std::size_t>(head.count * head.width);
    std::memcpy(out, head.begin(), size);
    std::memcpy(out + size, tail.begin(), static_cast<std::size_t>(tail.count * tail.width));
    return make_packed(data.get(), 0, count, head.width);
  });
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_sq_item, reinterpret_cast<void*>(item)},
    {Py_sq_concat, reinterpret_cast<void*>(concat)},
    {Py_mp_length, reinterpret_cast<void*>(length)},
    {Py_mp_subscript, reinterpret_cast<void*>(subscript)},
    {0, nullptr},
};

PyType_Spec spec = {"flexkv_kernels.block_index.PackedKeys", sizeof(Packed), 0,
                    Py_TPFLAGS_DEFAULT, slots};

__extension__ using Product = unsigned __int128;

std::uint64_t mix(std::uint64_t one, std::uint64_t other) noexcept {
  const Product product = static_cast<Product>(one) * other;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t word(const char* data, std::size_t size) noexcept {
  std::uint64_t value = 0;
  std::memcpy(&value, data, size);
  return value;
}

}  // namespace

KeyView view_of(PyObject* key) {
  if (!PyBytes_Check(key)) {
    PyErr_Format(PyExc_TypeError, "a key is %R; allowed: bytes", key);
    throw PythonError{};
  }
  return {PyBytes_AsString(key), static_cast<std::size_t>(PyBytes_Size(key))};
}

HashSeed HashSeed::random() {
  HashSeed seed;
  std::random_device random;
  for (std::uint64_t& value : seed.values) {
    value = (static_cast<std::uint64_t>(random()) << 32 | random()) | 1;
  }
  return seed;
}

Py_hash_t hash_of(KeyView key, const HashSeed& seed) noexcept {
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  const auto& [first, second, third] = seed.values;
  const char* data = key.data();
  std::size_t left = key.size();
  std::uint64_t hash = first ^ left;
  for (; left > 2 * kWord; left -= 2 * kWord, data += 2 * kWord) {
    hash = mix(word(data, kWord) ^ second, word(data + kWord, kWord) ^ hash);
  }
  const std::size_t low = left < kWord ? left : kWord;
  hash = mix(word(data, low) ^ second, word(data + low, left - low) ^ hash);
  return static_cast<Py_hash_t>(mix(hash ^ third, third));
}

Keys::Keys(PyObject* object) {
  if (Py_TYPE(object) == packed_type) {
    holder_ = share(object);
    const Packed& packed = *packed_of(object);
    packed_ = packed.begin();
    width_ = static_cast<std::size_t>(packed.width);
    size_ = packed.count;
  } else {
    items_ = std::make_unique<Items>(object);
    size_ = items_->size();
  }
}

Reference Keys::object(Py_ssize_t i) const {
  if (packed_ == nullptr) {
    return share((*items_)[i]);
  }
  return key_at(*packed_of(holder_.get()), i);
}

Reference Keys::sequence() const {
  if (packed_ == nullptr) {
    return share(items_->sequence());
  }
  Reference list = own(PyList_New(size_));
  for (Py_ssize_t i = 0; i < size_; ++i) {
    PyList_SetItem(list.get(), i, object(i).release());
  }
  return list;
}

Reference make_packed_keys_type() {
  Reference type = own(PyType_FromSpec(&spec));
  packed_type = reinterpret_cast<PyTypeObject*>(type.get());
  Py_INCREF(type.get());
  return type;
}

}  // namespace flexkv::index
