// SPDX-License-Identifier: Apache-2.0
//
// The type `KeySet`: which keys a tier has, in memory that other processes read.
//
// It has no key, but hashes of 64 bits, and takes 11 to 32 bytes for each. Its one owner changes it. What
// a reader meets in the middle of a change is absent.
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>

#include "../python/buffer.hpp"
#include "calls.hpp"
#include "flexkv/block_index.h"

namespace {

using flexkv::index::HashSeed;
using flexkv::index::Keys;
using flexkv::index::load_word;
using flexkv::index::store_word;
using flexkv::python::Buffer;
using flexkv::python::guarded;
using flexkv::python::Holder;
using flexkv::python::number;
using flexkv::python::own;
using flexkv::python::PythonError;
using flexkv::python::Reference;
using flexkv::python::share;

using Tag = std::uint64_t;
constexpr Tag kNone = 0;

struct alignas(64) Header {
  std::uint64_t magic;
  std::uint32_t layout;
  std::uint32_t is_complete;
  std::uint64_t places;
  HashSeed seed;
};

constexpr std::uint64_t kMagic = 0x545359454b564b46;  // FKVKEYST
constexpr std::uint32_t kLayout = 1;
constexpr std::size_t kHeaderBytes = 4096;

// Open addressing with linear probing, at most three quarters full.
std::size_t places_for(std::size_t keys) noexcept { return std::bit_ceil(keys + keys / 3 + 2); }

std::size_t bytes_of(std::size_t places) noexcept { return kHeaderBytes + places * sizeof(Tag); }

class Set {
 public:
  Set(std::unique_ptr<Buffer> memory, bool is_owner)
      : memory_(std::move(memory)),
        is_owner_(is_owner),
        header_(reinterpret_cast<Header*>(memory_->start())),
        tags_(reinterpret_cast<Tag*>(memory_->start() + kHeaderBytes)),
        mask_((memory_->size() - kHeaderBytes) / sizeof(Tag) - 1) {
    if (is_owner) {
      header_->layout = kLayout;
      header_->places = mask_ + 1;
      header_->seed = HashSeed::random();
      store_word(header_->magic, kMagic);
    }
  }

  bool is_complete() const noexcept { return load_word(header_->is_complete) != 0; }
  void set_complete(bool is_complete) noexcept {
    store_word(header_->is_complete, static_cast<std::uint32_t>(is_complete));
  }
  bool is_owner() const noexcept { return is_owner_; }
  std::size_t size() const noexcept { return size_; }

  // Calls `function` with the place in `keys` of each key, and its tag, until it returns false. The memory
  // of the tags is seldom in the processor's caches: that of later keys is fetched meanwhile.
  template <typename Function>
  void each(const Keys& keys, Function function) const {
    Tag tags[kAhead];
    const Py_ssize_t count = keys.size();
    for (Py_ssize_t i = 0; i < std::min(count, kAhead); ++i) {
      tags[i] = fetched(keys, i);
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      const Tag tag = tags[i % kAhead];
      if (i + kAhead < count) {
        tags[i % kAhead] = fetched(keys, i + kAhead);
      }
      if (!function(i, tag)) {
        return;
      }
    }
  }

  bool has(Tag tag) const noexcept { return load_word(tags_[place_of(tag)]) == tag; }

  // Returns false if there is no room.
  bool add(Tag tag) noexcept {
    const std::size_t place = place_of(tag);
    if (tags_[place] == tag) {
      return true;
    }
    if (size_ >= (mask_ + 1) / 4 * 3) {
      return false;
    }
    store_word(tags_[place], tag);
    ++size_;
    return true;
  }

  void remove(Tag tag) noexcept {
    std::size_t gap = place_of(tag);
    if (tags_[gap] == kNone) {
      return;
    }
    for (std::size_t i = after(gap); tags_[i] != kNone; i = after(i)) {
      // Tags move up to the gap unless that lies before their home.
      if (((i - home(tags_[i])) & mask_) >= ((i - gap) & mask_)) {
        store_word(tags_[gap], tags_[i]);
        gap = i;
      }
    }
    store_word(tags_[gap], kNone);
    --size_;
  }

 private:
  // Not tuned: more than the memory accesses that a core has under way at once.
  static constexpr Py_ssize_t kAhead = 16;

  std::size_t home(Tag tag) const noexcept { return static_cast<std::size_t>(tag) & mask_; }
  std::size_t after(std::size_t place) const noexcept { return (place + 1) & mask_; }

  Tag fetched(const Keys& keys, Py_ssize_t i) const {
    const Tag tag = std::max<Tag>(1, static_cast<Tag>(flexkv::index::hash_of(keys[i], header_->seed)));
    __builtin_prefetch(&tags_[home(tag)]);
    return tag;
  }

  // That of the tag, or of the gap in which it would be.
  std::size_t place_of(Tag tag) const noexcept {
    std::size_t place = home(tag);
    for (Tag found = load_word(tags_[place]); found != tag && found != kNone;
         found = load_word(tags_[place])) {
      place = after(place);
    }
    return place;
  }

  std::unique_ptr<Buffer> memory_;
  bool is_owner_;
  Header* header_;
  Tag* tags_;
  std::size_t mask_;
  std::size_t size_ = 0;  // as its owner knows it
};

using Self = Holder<Set>;

Set& of(PyObject* self) { return Self::of(self); }

// Throws PythonError if this process only reads the set.
Set& owned(PyObject* self) {
  if (!of(self).is_owner()) {
    PyErr_SetString(PyExc_TypeError, "this process reads the set; allowed: changes by its owner");
    throw PythonError{};
  }
  return of(self);
}

PyObject* contains(PyObject* self, PyObject* keys) {
  return guarded([&] {
    const Keys all(keys);
    Reference list = own(PyList_New(all.size()));
    of(self).each(all, [&](Py_ssize_t i, Tag tag) {
      PyList_SetItem(list.get(), i, share(of(self).has(tag) ? Py_True : Py_False).release());
      return true;
    });
    return list;
  });
}

PyObject* lookup(PyObject* self, PyObject* keys) {
  return guarded([&] {
    Py_ssize_t count = 0;
    of(self).each(Keys(keys), [&](Py_ssize_t, Tag tag) {
      const bool has = of(self).has(tag);
      count += has;
      return has;
    });
    return number(count);
  });
}

PyObject* add(PyObject* self, PyObject* keys) {
  return guarded([&] {
    Set& set = owned(self);
    Py_ssize_t refused = 0;
    set.each(Keys(keys), [&](Py_ssize_t, Tag tag) {
      refused += !set.add(tag);
      return true;
    });
    return number(refused);
  });
}

PyObject* remove_keys(PyObject* self, PyObject* keys) {
  return guarded([&] {
    Set& set = owned(self);
    set.each(Keys(keys), [&](Py_ssize_t, Tag tag) {
      set.remove(tag);
      return true;
    });
    return flexkv::python::none();
  });
}

PyObject* get_complete(PyObject* self, void*) {
  return guarded([&] { return share(of(self).is_complete() ? Py_True : Py_False); });
}

int set_complete(PyObject* self, PyObject* value, void*) {
  if (value == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "is_complete cannot be deleted");
    return -1;
  }
  const int is_true = PyObject_IsTrue(value);
  if (is_true < 0) {
    return -1;
  }
  try {
    owned(self).set_complete(is_true != 0);
  } catch (const PythonError&) {
    return -1;
  }
  return 0;
}

Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(of(self).size()); }

// KeySet(memory, is_owner)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* object = nullptr;
  int is_owner = 0;
  if (PyArg_ParseTuple(args, "Op", &object, &is_owner) == 0) {
    return nullptr;
  }
  return guarded([&] {
    auto memory = std::make_unique<Buffer>(object, is_owner != 0 ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    const std::size_t size = memory->size();
    const auto* const header = reinterpret_cast<const Header*>(memory->start());
    const std::size_t places = size < kHeaderBytes ? 0 : (size - kHeaderBytes) / sizeof(Tag);
    const bool fits = places >= 2 && std::has_single_bit(places) && size == bytes_of(places);
    if (!fits || (is_owner == 0 && (load_word(header->magic) != kMagic ||
                                    header->layout != kLayout || header->places != places))) {
      PyErr_Format(PyExc_ValueError, "the memory is no set of keys of layout %u; allowed: one of this version",
                   kLayout);
      throw PythonError{};
    }
    return Self::make(type, std::move(memory), is_owner != 0);
  });
}

PyMethodDef methods[] = {
    {"contains", contains, METH_O, nullptr},
    {"lookup", lookup, METH_O, nullptr},
    {"add", add, METH_O, nullptr},
    {"remove", remove_keys, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"is_complete", get_complete, set_complete, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Self::destroy)},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"flexkv_kernels.block_index.KeySet", sizeof(Self), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

std::uint64_t fkv_key_set_bytes(std::uint64_t keys) { return bytes_of(places_for(keys)); }

PyObject* fkv_key_set_type(void) {
  return guarded([] { return own(PyType_FromSpec(&spec)); });
}
