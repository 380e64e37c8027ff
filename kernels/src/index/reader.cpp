// SPDX-License-Identifier: Apache-2.0
//
// The type `IndexReader`: an index in shared memory as a process reads it that does not own it.
#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "../python/buffer.hpp"
#include "calls.hpp"
#include "flexkv/block_index.h"
#include "holds.hpp"

namespace {

using flexkv::index::Epoch;
using flexkv::index::Header;
using flexkv::index::Hold;
using flexkv::index::Keys;
using flexkv::index::list_of;
using flexkv::index::load_word;
using flexkv::index::numbers_of;
using flexkv::index::Places;
using flexkv::index::Reading;
using flexkv::index::Slot;
using flexkv::index::store_word;
using flexkv::python::Buffer;
using flexkv::python::guarded;
using flexkv::python::Holder;
using flexkv::python::none;
using flexkv::python::number;
using flexkv::python::own;
using flexkv::python::PythonError;
using flexkv::python::Reference;

class Reader {
 public:
  // The memory has the size for its slots, and `holds` a counter for each of them.
  Reader(std::unique_ptr<Buffer> memory, std::unique_ptr<Buffer> holds, std::size_t slots)
      : memory_(std::move(memory)),
        holds_memory_(std::move(holds)),
        reading_(Places(slots), memory_->start()),
        holds_(reinterpret_cast<Hold*>(holds_memory_->start())) {}

  const Reading& reading() const noexcept { return reading_; }

  // Holds the blocks of all keys. Returns their slots; none, and holds nothing, if one is missing or
  // has no room for a hold.
  std::vector<Slot> lease(const Keys& keys) {
    const Epoch epoch = reading_.epoch();
    const std::vector<Seen> seen = look(keys, epoch);
    std::size_t held = 0;
    std::size_t more = held_slots_;
    while (held < seen.size() && begin_hold(seen[held].slot, more)) {
      ++held;
    }
    flexkv::index::fence();
    bool is_held = held == static_cast<std::size_t>(keys.size()) && reading_.epoch() == epoch;
    std::vector<Slot> slots(is_held ? held : 0);
    for (std::size_t i = 0; is_held && i < held; ++i) {
      is_held = version(seen[i].slot) == seen[i].version;
      slots[i] = seen[i].slot;
    }
    for (std::size_t i = 0; !is_held && i < held; ++i) {
      end_hold(seen[i].slot, more);
    }
    held_slots_ = more;
    return is_held ? slots : std::vector<Slot>{};
  }

  // Ends a hold of each slot. Throws PythonError if one is not held.
  void release(const std::vector<Py_ssize_t>& slots) {
    std::size_t left = held_slots_;
    for (const Py_ssize_t slot : slots) {
      if (!has(slot) || holds_[slot] == 0) {
        held_slots_ = left;
        PyErr_Format(PyExc_ValueError, "slot %zd is not held", slot);
        throw PythonError{};
      }
      end_hold(static_cast<Slot>(slot), left);
    }
    held_slots_ = left;
  }

  // Holds these and nothing else. What is held before and after is held all the time. Throws PythonError
  // if one is no slot.
  void settle(const std::vector<Py_ssize_t>& slots) {
    std::vector<Hold> wanted(reading_.slots());
    for (const Py_ssize_t slot : slots) {
      if (!has(slot)) {
        PyErr_Format(PyExc_ValueError, "slot %zd is none of %zu", slot, reading_.slots());
        throw PythonError{};
      }
      ++wanted[static_cast<std::size_t>(slot)];
    }
    held_slots_ = 0;
    for (std::size_t slot = 0; slot < wanted.size(); ++slot) {
      held_slots_ += wanted[slot] != 0;
      if (holds_[slot] != wanted[slot]) {
        store_word(holds_[slot], wanted[slot]);
      }
    }
  }

  // The number of slots that are held, however often.
  std::size_t held_slots() const noexcept { return held_slots_; }

  std::size_t held() const noexcept {
    std::size_t sum = 0;
    for (std::size_t slot = 0; slot < reading_.slots(); ++slot) {
      sum += holds_[slot];
    }
    return sum;
  }

 private:
  struct Seen {
    Slot slot;
    std::uint32_t version;
  };

  std::uint32_t version(Slot slot) const noexcept { return load_word(reading_.key(slot).version); }

  // The slots of the keys, up to the first whose block cannot be leased now.
  std::vector<Seen> look(const Keys& keys, Epoch epoch) const {
    std::vector<Seen> seen;
    seen.reserve(static_cast<std::size_t>(keys.size()));
    reading_.in_portions(keys, [&](Py_ssize_t start, const Py_hash_t* hashes, Py_ssize_t size) {
      Reading::Said said[Reading::kAtOnce];
      for (Py_ssize_t i = 0; i < size; ++i) {
        said[i] = reading_.first(hashes[i]);
        if (has(said[i].slot)) {
          reading_.prefetch_key(said[i].slot);
        }
      }
      for (Py_ssize_t i = 0; i < size; ++i) {
        if (!has(said[i].slot) || said[i].epoch != epoch || !said[i].ready) {
          return false;
        }
        const Slot slot = said[i].slot;
        const std::uint32_t before = version(slot);
        if (before % 2 != 0 || !has_key(slot, keys[start + i])) {
          return false;
        }
        seen.push_back({slot, before});
      }
      return true;
    });
    return seen;
  }

  bool has(Py_ssize_t slot) const noexcept {
    return slot >= 0 && static_cast<std::size_t>(slot) < reading_.slots();
  }

  // Whether the slot has this key now, which may change at once.
  bool has_key(Slot slot, flexkv::index::KeyView key) const noexcept {
    const flexkv::index::StoredKey& stored = reading_.key(slot);
    return stored.size == key.size() && std::equal(key.begin(), key.end(), stored.bytes);
  }

  // Counts a hold, and the slot in `slots` if it is the first one. Returns false if there is no room.
  bool begin_hold(Slot slot, std::size_t& slots) noexcept {
    const Hold holds = holds_[slot];
    if (holds == std::numeric_limits<Hold>::max()) {
      return false;
    }
    store_word(holds_[slot], static_cast<Hold>(holds + 1));
    slots += holds == 0;
    return true;
  }

  // Counts a hold less, and the slot in `slots` if it was the last one.
  void end_hold(Slot slot, std::size_t& slots) noexcept {
    const Hold holds = holds_[slot];
    store_word(holds_[slot], static_cast<Hold>(holds - 1));
    slots -= holds == 1;
  }

  std::unique_ptr<Buffer> memory_;
  std::unique_ptr<Buffer> holds_memory_;
  Reading reading_;
  Hold* holds_;
  std::size_t held_slots_ = 0;
};

using Self = Holder<Reader>;

Reader& of(PyObject* self) { return Self::of(self); }

const Reading& reading_of(PyObject* self) { return of(self).reading(); }

PyObject* lease(PyObject* self, PyObject* keys) {
  return guarded([&] {
    const Keys all(keys);
    const std::vector<Slot> slots = of(self).lease(all);
    if (slots.empty() && all.size() != 0) {
      return none();
    }
    return list_of(slots);
  });
}

template <void (Reader::*method)(const std::vector<Py_ssize_t>&)>
PyObject* with_slots(PyObject* self, PyObject* slots) {
  return guarded([&] {
    (of(self).*method)(numbers_of(slots));
    return none();
  });
}

PyObject* get_held(PyObject* self, void*) {
  return guarded([&] { return number(static_cast<Py_ssize_t>(of(self).held())); });
}

PyObject* get_held_slots(PyObject* self, void*) {
  return guarded([&] { return number(static_cast<Py_ssize_t>(of(self).held_slots())); });
}

// IndexReader(memory, holds)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* memory = nullptr;
  PyObject* holds = nullptr;
  if (PyArg_ParseTuple(args, "OO", &memory, &holds) == 0) {
    return nullptr;
  }
  return guarded([&] {
    auto index = std::make_unique<Buffer>(memory, PyBUF_SIMPLE);
    auto counters = std::make_unique<Buffer>(holds, PyBUF_WRITABLE);
    if (!flexkv::index::is_index(index->start(), index->size())) {
      flexkv::index::refuse_memory();
    }
    const std::size_t slots = reinterpret_cast<const Header*>(index->start())->slots;
    if (counters->size() != slots * sizeof(Hold)) {
      PyErr_Format(PyExc_ValueError, "%zu bytes for holds; allowed: %zu", counters->size(),
                   slots * sizeof(Hold));
      throw PythonError{};
    }
    return Self::make(type, std::move(index), std::move(counters), slots);
  });
}

PyMethodDef methods[] = {
    {"lookup", flexkv::index::lookup<reading_of>, METH_O, nullptr},
    {"present", flexkv::index::present<reading_of>, METH_O, nullptr},
    {"missing", flexkv::index::missing<reading_of>, METH_O, nullptr},
    {"lease", lease, METH_O, nullptr},
    {"release", with_slots<&Reader::release>, METH_O, nullptr},
    {"settle", with_slots<&Reader::settle>, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"held", get_held, nullptr, nullptr, nullptr},
    {"held_slots", get_held_slots, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Self::destroy)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"flexkv_kernels.block_index.IndexReader", sizeof(Self), 0, Py_TPFLAGS_DEFAULT,
                    slots};

}  // namespace

PyObject* fkv_index_reader_type(void) {
  return guarded([] { return own(PyType_FromSpec(&spec)); });
}
