// The machine's larger part, linked to every kernel.
#include "machine.hpp"

#include <utility>

namespace mlaforge::sim {

Machine* machine = nullptr;

// ---- Vector clocks -----------------------------------------------------------------------------------------------

// A machine spends much of its time here.
#if defined(__x86_64__) && defined(__GLIBC__)
__attribute__((target_clones("avx2", "default")))
#endif
void take_larger(std::uint32_t* __restrict to, const std::uint32_t* __restrict from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
}

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  take_larger(into.data(), other.data(), other.size());
}

void join(Clocks& into, const Clocks& other) {
  for (const auto& [cluster, clock] : other) join(into[cluster], clock);
}

void View::join_with(const View& other) {
  join(seen, other.seen);
  join(fenced, other.fenced);
  join_others(other.others);
  ++version;
}

void View::join_others(const std::shared_ptr<const Clocks>& more) {
  if (!more || more == others) return;
  if (!others) {
    others = more;
    return;
  }
  auto joined = std::make_shared<Clocks>(*others);
  join(*joined, *more);
  others = std::move(joined);
}

void Released::join_with(const Released& other) {
  join(seen, other.seen);
  join(fenced, other.fenced);
}

// ---- The machine -------------------------------------------------------------------------------------------------

Machine::Machine(const Settings& settings, Dim3 grid, Dim3 cluster, int threads, std::uint32_t smem_bytes,
                 std::vector<Region> regions)
    : settings_(settings),
      random_(settings.seed * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(settings.kernel)),
      grid_(grid),
      cluster_(cluster),
      cluster_size_(static_cast<int>(cluster.x * cluster.y * cluster.z)),
      size_(settings.cooperative ? static_cast<int>(grid.x * grid.y * grid.z) : cluster_size_),
      threads_(threads),
      warps_((threads + kWarp - 1) / kWarp),
      actors_(size_ * (threads + warps_ + kMaxBarriers)),
      smem_bytes_(smem_bytes),
      regions_(std::move(regions)),
      writers_(kept_writers(settings)) {}

Machine::~Machine() {
  if (stacks_) munmap(stacks_, stack_bytes());
}

std::string Machine::run(const std::function<void()>& kernel) {
  kernel_ = &kernel;
  if (!settings_.overlap) writers_.clear();
  std::vector<std::uint64_t> order(static_cast<std::size_t>(grid_.x) * grid_.y * grid_.z / size_);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_);
  allocate_stacks();
  for (std::uint64_t linear : order) {
    if (!fault_.empty()) break;
    number_ = linear;
    run_blocks();
  }
  if (settings_.trace) write_trace();
  return fault_;
}

void Machine::fail(const Where& where, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  report(where, text);
  abandon();
}

void Machine::block_until(std::function<bool()> ready, std::function<std::string()> what, const Where& where) {
  if (ready()) {
    maybe_yield();
    if (ready()) return;
  }
  Fiber& self = *current_;
  self.waiting_for = std::move(what);
  self.waiting_at = where;
  self.ready = std::move(ready);
  yield();
  self.ready = nullptr;
}

void Machine::gather(const char* what, const Where& where, void* mine, const std::function<void(void* const*)>& last) {
  Gathering& g = home().gatherings[warp()];
  const int lanes = std::min(kWarp, threads_ - warp() * kWarp);
  for (int i = 0; g.exited && i < lanes; ++i) {
    if (lane_of_warp(i).finished) fail(where, "%s: lane %d of the warp has exited", what, i);
  }
  if (g.arrived == 0) {
    g.what = what;
    g.where = where;
  } else if (std::strcmp(g.what, what) != 0 || g.where.line() != where.line() || g.where.column() != where.column()) {
    fail(where, "the lanes of a warp do not meet: %s here, %s at %s", what, g.what, place(g.where).c_str());
  }
  g.slots[lane()] = mine;
  if (++g.arrived == lanes) {
    last(g.slots);
    g.arrived = 0;
    ++g.generation;
    return;
  }
  const std::uint64_t generation = g.generation;
  block_until([&g, generation] { return g.generation != generation; }, [what] { return std::string("the other lanes, in ") + what; }, where);
}

void Machine::sync_warp(const Where& where) {
  tick();
  gather("syncwarp", where, &view(), [this](void* const* slots) {
    View all = fresh_view();
    for (int i = 0; i < kWarp; ++i) all.join_with(*static_cast<View*>(slots[i]));
    for (int i = 0; i < kWarp; ++i) {
      View& lane = *static_cast<View*>(slots[i]);
      all.version = lane.version + 1;
      lane = all;
    }
  });
}

void Machine::touch(std::uint32_t address, std::uint32_t bytes, bool write, Access access, const View& view) {
  touch(home(), address, bytes, write, access, view);
}

void Machine::touch(Block& block, std::uint32_t address, std::uint32_t bytes, bool write, Access access, const View& view) {
  if (tracing() && &block == &home()) trace_access(address - kSharedBase, bytes, write, access);
  const std::uint32_t first = (address - kSharedBase) / 4, last = (address - kSharedBase + bytes - 1) / 4;
  if (write) std::memset(block.marked.data() + first, 0, last - first + 1);
  for (std::uint32_t i = first; i <= last; ++i) {
    Shadow& s = block.shadow[i];
    if (s.write.actor >= 0 && s.write.actor != access.actor) require_order(s.write, "write", access, write, view, i);
    if (write) {
      for (const Access& read : s.reads) {
        if (read.actor != access.actor) require_order(read, "read", access, write, view, i);
      }
      s.reads.clear();
      s.write = access;
    } else {
      auto mine = std::find_if(s.reads.begin(), s.reads.end(), [&](const Access& r) { return r.actor == access.actor; });
      if (mine != s.reads.end()) {
        *mine = access;
      } else {
        s.reads.push_back(access);
      }
    }
  }
}

Mark Machine::take_mark(std::uint16_t element, std::uint32_t address, const Access& access) {
  if (!is_mark(element)) return kNoMark;
  if (!is_raw(element)) return element;
  return make_mark({access.actor, access.where, element, false, ""}, [&] {
    const bool unwritten = element == kUnwritten;
    return (unwritten ? "" : origin(element).text + "; ") + who() + " reads byte " + std::to_string(address - kSharedBase) +
           " of shared memory" + (unwritten ? ", which is uninitialised so far, at " : " at ") + place(access.where);
  });
}

Mark Machine::mark_in_flight(const Where& where) {
  return make_mark({-1, where, kNoMark, false, ""},
                   [&] { return "an accumulator that the wgmma at " + place(where) + " is writing"; });
}

void Machine::copy_mark(Block& to, std::uint32_t address, std::uint32_t bytes, const Access& access, const void* from) {
  const Mark mark = make_mark({access.actor, access.where, kNoMark, true, ""}, [&] {
    return who() + " copies uninitialised bytes of " + region_of(from).name + " at " + place(access.where);
  });
  for (std::uint32_t i = address & ~1u; i < address + bytes; i += 2) {
    std::memcpy(shared(to, i, 2, access.where), &mark, 2);
    to.marked[(i - kSharedBase) / 4] = 1;
  }
}

void Machine::require_defined_load(std::uint32_t address, const unsigned char* p, bool is_float, const Where& where) {
  for (int half = 0; half < 2; ++half) {
    std::uint16_t element;
    std::memcpy(&element, p + 2 * half, 2);
    if (!is_mark(element)) continue;
    if (is_raw(element) || !is_float) fail(where, "this load reads %s", describe(element, address).c_str());
  }
}

void Machine::require_defined(Mark mark, const void* to, const Where& where) {
  if (mark != kNoMark) fail(where, "this store to %s writes %s", region_of(to).name, describe(mark, kSharedBase).c_str());
}

void Machine::require_defined_copy(std::uint32_t address, std::uint32_t bytes, const void* to, const Where& where) {
  if (!may_be_marked(home(), address, bytes)) return;
  for (std::uint32_t i = address & ~1u; i < address + bytes; i += 2) {
    std::uint16_t element;
    std::memcpy(&element, shared(i, 2, where), 2);
    if (is_mark(element)) fail(where, "this store to %s writes %s", region_of(to).name, describe(element, i).c_str());
  }
}

bool Machine::global(const void* pointer, std::uint64_t bytes, bool write, const Where& where, Manner manner) {
  const auto address = reinterpret_cast<std::uint64_t>(pointer);
  if (address % bytes && bytes <= 16) fail(where, "misaligned global access: %lu bytes at %#lx", bytes, address);
  for (std::size_t r = 0; r < regions_.size(); ++r) {
    const Region& region = regions_[r];
    if (address < region.address || address + bytes > region.address + region.bytes) continue;
    if (write && !region.writable) fail(where, "write to %s, which is an input", region.name);
    bool undefined = track_global(address, bytes, write, region, where, manner);
    const std::uint64_t offset = address - region.address;
    if (region.unwritten) {
      for (std::uint64_t i = offset / 16; i <= (offset + bytes - 1) / 16; ++i) undefined = undefined || region.unwritten[i];
    }
    if (undefined && !manner.copies) {
      fail(where, "this load reads byte %lu of %s, which is uninitialised so far", offset, region.name);
    }
    return undefined;
  }
  fail(where, "global %s out of bounds: %lu bytes at %#lx, outside of every tensor", write ? "write" : "read", bytes,
       address);
}

void Machine::atomic(const void* pointer, bool acquire, bool release) {
  Released& word = atomics_[reinterpret_cast<std::uint64_t>(pointer)];
  const Released found = word;
  if (release) {
    word.join_with(released());
    tick();
  } else {
    word.join_with(current_->fenced);
  }
  if (acquire) {
    take_over(found);
  } else {
    current_->gathered.join_with(found);
  }
}

void Machine::fence_gpu() {
  take_over(current_->gathered);
  current_->fenced = released();
  tick();
}

void Machine::poll(const std::int32_t* word, std::int32_t value, const Where& where) {
  Fiber& self = *current_;
  if (self.polled != word || self.polled_value != value) {
    self.polled = word;
    self.polled_value = value;
    self.polls = 0;
  }
  if (++self.polls < kPatience) {
    maybe_yield();
    return;
  }
  self.polls = 0;
  block_until([word, value] { return *word != value; },
              [value, alone = !settings_.cooperative] {
                return "a change of a word in global memory that holds " + std::to_string(value) +
                       (alone ? " (blocks outside of a cluster run one after another)" : "");
              },
              where);
}

NamedBarrier& Machine::named(int id, const Where& where) {
  if (id < 0 || id > 15) fail(where, "named barrier %d: ids are 0 to 15", id);
  return home().named[id];
}

std::uint64_t Machine::arrive_named(int id, int count, const Where& where, bool any) {
  NamedBarrier& bar = named(id, where);
  if (count % kWarp || count <= 0 || count > threads_) {
    fail(where, "named barrier %d: %d threads is no multiple of a warp in the block", id, count);
  }
  if (bar.arrived == 0) {
    bar.expected = count;
    bar.gathering = fresh_view();
    bar.any = false;
  } else if (bar.expected != count) {
    fail(where, "named barrier %d: %d threads expected here, %d by others", id, count, bar.expected);
  }
  bar.gathering.join_with(view());
  bar.any = bar.any || any;
  tick();
  const std::uint64_t generation = bar.generation;
  if (++bar.arrived == count) {
    bar.arrived = 0;
    bar.any_released = bar.any;
    bar.released = bar.gathering;
    ++bar.generation;
  }
  return generation;
}

bool Machine::sync_named(int id, int count, const Where& where, bool any) {
  const std::uint64_t generation = arrive_named(id, count, where, any);
  NamedBarrier& bar = home().named[id];
  if (lane() == 0) event("barrier", where, {{"id", id}, {"threads", count}});
  block_until([&bar, generation] { return bar.generation != generation; },
              [id, count] { return "named barrier " + std::to_string(id) + " for " + std::to_string(count) + " threads"; }, where);
  if (lane() == 0) event("barrier passed", where, {{"id", id}});
  view().join_with(bar.released);
  return bar.any_released;
}

void Machine::arrive_cluster(const Where& where) {
  if (current_->cluster_arrived) fail(where, "a second arrival at the cluster barrier, with no wait between");
  NamedBarrier& bar = cluster_barrier(current_->block);
  if (bar.arrived++ == 0) bar.gathering = fresh_view();
  bar.gathering.join_with(view());
  tick();
  current_->cluster_arrived = true;
  current_->cluster_generation = bar.generation;
  event("cluster arrive", where);
  settle_cluster();
  maybe_yield();
}

void Machine::wait_cluster(const Where& where) {
  if (!current_->cluster_arrived) fail(where, "a wait at the cluster barrier without an arrival");
  event("cluster wait", where);
  NamedBarrier& bar = cluster_barrier(current_->block);
  block_until([&bar, generation = current_->cluster_generation] { return bar.generation != generation; },
              [] { return std::string("the other threads of the cluster"); }, where);
  current_->cluster_arrived = false;
  view().join_with(bar.released);
}

Mbarrier& Machine::mbarrier(Block& block, std::uint32_t address, const Where& where) {
  auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail(where, "no mbarrier was initialised at %u", address - kSharedBase);
  Mbarrier& bar = found->second;
  if (bar.init.actor != actor() && !has_seen(view().seen, bar.init.actor, bar.init.clock)) {
    fail(where, "the mbarrier at %u is used without an order behind its initialisation at %s", address - kSharedBase,
         place(bar.init.where).c_str());
  }
  return bar;
}

void Machine::init_mbarrier(std::uint32_t address, int count, const Where& where) {
  shared(address, 8, where);
  if (address % 8) fail(where, "misaligned mbarrier at %u", address - kSharedBase);
  auto& mbarriers = home().mbarriers;
  if (mbarriers.count(address)) fail(where, "the mbarrier at %u is initialised twice", address - kSharedBase);
  if (mbarriers.size() == kMaxBarriers) fail(where, "more than %d mbarriers", kMaxBarriers);
  Mbarrier bar;
  bar.actor = size_ * (threads_ + warps_) + current_->block * kMaxBarriers + static_cast<int>(mbarriers.size());
  bar.address = address - kSharedBase;
  bar.count = bar.pending = count;
  bar.init = {actor(), view().seen[actor()], Proxy::generic, where};
  bar.gathering = bar.completed = fresh_view();
  mbarriers.emplace(address, std::move(bar));
}

void Machine::fence_mbarriers() {
  for (auto& [address, bar] : home().mbarriers) {
    if (bar.init.actor == actor()) bar.fenced = true;
  }
}

void Machine::arrive_mbarrier(std::uint32_t address, std::int64_t expect, const Where& where) {
  arrive_mbarrier(home(), address, expect, where);
}

void Machine::arrive_mbarrier(Block& block, std::uint32_t address, std::int64_t expect, const Where& where) {
  require_alive(block, where);
  Mbarrier& bar = mbarrier(block, address, where);
  if (bar.pending == 0) {
    fail(where, "the mbarrier at %u gets more than its %d arrivals in phase %u", address - kSharedBase, bar.count, bar.phase);
  }
  bar.bytes += expect;
  --bar.pending;
  bar.gathering.join_with(view());
  tick();
  event(expect ? "expect" : "arrive", where, {{"mbarrier", bar.address}, {"phase", bar.phase}, {"bytes", expect}});
  settle(bar, where);
  maybe_yield();
}

void Machine::wait_mbarrier(std::uint32_t address, int parity, const Where& where) {
  Mbarrier& bar = mbarrier(address, where);
  if (lane() == 0) event("wait", where, {{"mbarrier", bar.address}, {"parity", parity}});
  block_until([&bar, parity] { return static_cast<int>(bar.phase & 1) != (parity & 1); },
              [at = address - kSharedBase, parity] {
                return "the mbarrier at " + std::to_string(at) + ", parity " + std::to_string(parity);
              },
              where);
  if (lane() == 0) event("waited", where, {{"mbarrier", bar.address}});
  view().join_with(bar.completed);
}

bool Machine::test_mbarrier(std::uint32_t address, int parity, const Where& where) {
  Mbarrier& bar = mbarrier(address, where);
  maybe_yield();
  const bool ended = static_cast<int>(bar.phase & 1) != (parity & 1);
  if (ended) view().join_with(bar.completed);
  return ended;
}

void Machine::copy_async(Block& target, std::uint32_t bar_address, std::int64_t bytes, const Where& where,
                const std::function<void(Access, const View&)>& write) {
  Mbarrier& bar = mbarrier(target, bar_address, where);
  if (!bar.fenced) fail(where, "the mbarrier at %u is not visible to TMA: fence its initialisation", bar_address - kSharedBase);
  const std::int64_t number = ++copies_issued_;
  event("copy", where, {{"copy", number}, {"mbarrier", bar.address}, {"phase", bar.phase}, {"bytes", bytes}});
  // Everything that lands in a phase becomes known together, when the phase ends: the phase is the actor's clock.
  const Access access{bar.actor, bar.phase + 1, Proxy::async, where};
  const View issued = view();
  copies_.push_back({[this, &target, &bar, bytes, number, access, issued, write] {
                       if (target.rank != current_->block) require_alive(target, access.where);
                       landing_ = event("landed", access.where, {{"copy", number}});
                       write(access, issued);
                       landing_ = nullptr;
                       bar.bytes -= bytes;
                       settle(bar, access.where);
                     },
                     current_});
  // What the thread does from here on is no longer ordered before the copy.
  tick();
  if (settings_.mode == 0) land_copy(copies_.size() - 1);
  maybe_yield();
}

std::int32_t Machine::add_actor(const char* what) {
  late_actors_.emplace_back(what, current_);
  return actors_ + static_cast<std::int32_t>(late_actors_.size()) - 1;
}

void Machine::copy_alone(std::uint32_t to, const void* from, const Where& where) {
  CopyQueue& q = current_->copies;
  if (q.actor < 0) q.actor = add_actor("an asynchronous copy");
  if (!q.issued || q.version != view().version) {
    q.issued = std::make_shared<const View>(view());
    // What the thread does from here on is no longer ordered before the copy, nor before those that follow with the same view.
    tick();
    q.version = view().version;
  }
  q.where = where;
  q.open.push_back({to, from, where, q.issued});
  q.waited = false;
}

std::shared_ptr<CopyGroup> Machine::close_copies(const Where& where) {
  CopyQueue& q = current_->copies;
  if (q.actor < 0) q.actor = add_actor("an asynchronous copy");
  auto group = std::make_shared<CopyGroup>();
  group->pieces = std::move(q.open);
  q.open.clear();
  group->number = ++q.groups;
  group->where = where;
  group->view = view();
  q.closed.push_back(group);
  tick();
  return group;
}

void Machine::arrive_copied(std::uint32_t address, const Where& where) {
  Mbarrier& bar = mbarrier(address, where);
  const auto group = close_copies(where);
  group->bar = &bar;
  group->traced = ++copies_issued_;
  event("copy", where,
        {{"copy", group->traced}, {"mbarrier", bar.address}, {"phase", bar.phase}, {"bytes", 16 * static_cast<std::int64_t>(group->pieces.size())}});
  current_->copies.where = where;
  current_->copies.waited = false;
  copies_.push_back({[this, group, fiber = current_] { land_group(*fiber, *group); }, current_});
  if (settings_.mode == 0) land_copy(copies_.size() - 1);
  maybe_yield();
}

void Machine::wait_copied(const Where& where) {
  if (current_->copies.actor < 0) return;
  const auto group = close_copies(where);
  land_group(*current_, *group);
  see(view().seen, current_->copies.actor, group->number);
  ++view().version;
  current_->copies.waited = true;
  maybe_yield();
}

void Machine::land_group(Fiber& fiber, const CopyGroup& last) {
  CopyQueue& q = fiber.copies;
  while (!last.landed) {
    const std::shared_ptr<CopyGroup> group = q.closed.front();
    q.closed.pop_front();
    group->landed = true;
    if (group->bar) landing_ = event("landed", group->where, {{"copy", group->traced}});
    Block& block = blocks_[fiber.block];
    for (const CopyGroup::Piece& piece : group->pieces) {
      const Access access{q.actor, group->number, Proxy::generic, piece.where};
      touch(block, piece.to, 16, true, access, *piece.issued);
      const bool undefined = global(piece.from, 16, false, piece.where, {.copies = true});
      std::memcpy(shared(block, piece.to, 16, piece.where), piece.from, 16);
      for (std::uint32_t word = 0; word < 16; word += 4) {
        const void* from = static_cast<const unsigned char*>(piece.from) + word;
        if (undefined && global(from, 4, false, piece.where, {.copies = true})) {
          copy_mark(block, piece.to + word, 4, access, from);
        } else {
          unflag_marked(block, piece.to + word);
        }
      }
    }
    landing_ = nullptr;
    if (!group->bar) continue;
    Mbarrier& bar = *group->bar;
    if (bar.pending == 0) {
      fail(group->where, "the mbarrier at %u gets more than its %d arrivals in phase %u", bar.address, bar.count, bar.phase);
    }
    --bar.pending;
    bar.gathering.join_with(group->view);
    see(bar.gathering.seen, q.actor, group->number);
    settle(bar, group->where);
  }
}

void Machine::store_async(const Where& where, std::function<void(Access, const View&)> read, std::function<void(Access)> write) {
  StoreQueue& q = current_->stores;
  if (q.actor < 0) {
    q.actor = add_actor("a bulk store");  // its reads, and then its writes
    add_actor("a bulk store");
  }
  const Access reads{q.actor, q.groups + 1, Proxy::async, where};
  const Access writes{q.actor + 1, q.groups + 1, Proxy::async, where};
  auto store = std::make_shared<Store>();
  store->read = [this, reads, issued = view(), read = std::move(read)] {
    landing_ = event("store read", reads.where, {{"group", reads.clock}});
    read(reads, issued);
    landing_ = nullptr;
  };
  store->write = [writes, write = std::move(write)] { write(writes); };
  event("store", where, {{"group", reads.clock}});
  q.where = where;
  q.open.push_back(store);
  stores_.push_back({std::move(store), current_});
  tick();
  if (settings_.mode == 0) land_store(stores_.size() - 1, true);
  maybe_yield();
}

void Machine::commit_stores() {
  StoreQueue& q = current_->stores;
  q.committed.push_back(std::move(q.open));
  q.open.clear();
  ++q.groups;
}

void Machine::wait_stores(int pending, bool whole, const Where& where) {
  StoreQueue& q = current_->stores;
  if (q.actor < 0) return;
  for (std::size_t i = 0; i + pending < q.committed.size(); ++i) {
    for (auto& store : q.committed[i]) advance(*store, whole);
  }
  if (q.groups > static_cast<std::uint32_t>(pending)) {
    q.read = std::max(q.read, q.groups - pending);
    see(view().seen, q.actor, q.read);
    if (whole) see(view().seen, q.actor + 1, q.groups - pending);
    ++view().version;
  }
  if (whole) {
    while (q.committed.size() > static_cast<std::size_t>(pending)) q.committed.pop_front();
  }
  event(whole ? "store waited" : "store read waited", where, {{"pending", pending}});
  maybe_yield();
}

void Machine::issue_matmul(const Where& where, std::function<void(Access, const View&)> compute, std::function<void()> finish) {
  TensorQueue& q = queue();
  if (!q.fenced) fail(where, "wgmma without a wgmma fence since the registers were last in use");
  bool changed = q.view == nullptr;
  for (int i = 0; i < kWarp; ++i) changed |= q.joined[i] != lane_of_warp(i).view.version;
  if (changed) {
    auto joined = std::make_shared<View>(q.view ? *q.view : fresh_view());
    for (int i = 0; i < kWarp; ++i) {
      const View& lane = lane_of_warp(i).view;
      joined->join_with(lane);
      q.joined[i] = lane.version;
    }
    q.view = std::move(joined);
    // What the lanes do from here on is no longer ordered before this operation, nor before those that follow with the
    // same view: the versions stay. A write to an operand of a later one needs a fence, which gives a new version.
    for (int i = 0; i < kWarp; ++i) ++lane_of_warp(i).view.seen[actor() - lane() + i];
  }
  const Access access{tensor_actor(), ++q.clock, Proxy::async, where};
  event("wgmma", where, {{"operation", q.clock}});
  q.open.push_back({[this, access, view = q.view, compute = std::move(compute)] {
                      landing_ = event("wgmma landed", access.where, {{"operation", access.clock}});
                      compute(access, *view);
                      landing_ = nullptr;
                    },
                    std::move(finish)});
  if (settings_.mode == 0) land(q.open.back());
}

void Machine::match_matmul(const Where& where, std::uint64_t a, std::uint64_t b, int n, bool accumulate) {
  const int first = warp() / 4 * 4;
  Warpgroup& group = home().warpgroups[warp() / 4];
  const std::size_t at = queue().clock - group.before;
  if (at == group.issued.size()) {
    group.issued.push_back({where, a, b, n, accumulate});
  } else {
    const Together& other = group.issued[at];
    const bool same_place = other.where.line() == where.line() && other.where.file_name() == where.file_name();
    if (!same_place || other.a != a || other.b != b || other.n != n || other.accumulate != accumulate) {
      fail(where, "the warps of a warpgroup issue different wgmma: this one, and another the one at %s", place(other.where).c_str());
    }
  }
  bool all = at == 0;
  for (int w = first; w < first + 4; ++w) all = all && (w == warp() || home().queues[w].clock > group.before);
  if (all) {
    group.issued.pop_front();
    ++group.before;
  }
}

void Machine::commit_matmuls(const Where& where) {
  TensorQueue& q = queue();
  event("commit", where, {{"operation", q.clock}});
  q.committed.push_back({std::move(q.open), q.clock});
  q.open.clear();
}

void Machine::wait_matmuls(int pending, const Where& where) {
  TensorQueue& q = queue();
  if (!q.open.empty()) fail(where, "wgmma wait with %zu operations that no commit has closed", q.open.size());
  while (q.committed.size() > static_cast<std::size_t>(pending)) {
    for (Matmul& m : q.committed.front().operations) land(m);
    for (Matmul& m : q.committed.front().operations) m.finish();
    q.done = q.committed.front().last_clock;
    q.committed.pop_front();
  }
  q.fenced = false;
  event("wgmma waited", where, {{"operation", q.done}});
}

void Machine::see_matmuls() {
  view().seen[tensor_actor()] = queue().done;
  ++view().version;
}

std::string Machine::place(const Where& where) {
  const char* file = std::strrchr(where.file_name(), '/');
  return std::string(file ? file + 1 : where.file_name()) + ":" + std::to_string(where.line());
}

TraceEvent* Machine::event(const char* what, const Where& where, TraceArguments arguments) {
  if (!tracing()) return nullptr;
  for (auto open = open_accesses_.begin(); open != open_accesses_.end();) {
    open = std::get<0>(open->first) == warp() ? open_accesses_.erase(open) : std::next(open);
  }
  std::string text;
  for (const auto& [name, value] : arguments) text += (text.empty() ? "" : " ") + (name + ("=" + std::to_string(value)));
  ++steps_;
  const std::uint64_t time = steps_ - first_step_;
  trace_.push_back({time, time, thread(), what, where, std::move(text), {}});
  return &trace_.back();
}

void Machine::allocate_stacks() {
  void* memory = mmap(nullptr, stack_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    fault_ = "no memory for the stacks of the threads";
  } else {
    stacks_ = static_cast<unsigned char*>(memory);
  }
}

void Machine::trace_access(std::uint32_t offset, std::uint32_t bytes, bool write, const Access& access) {
  TraceEvent* into = landing_;
  if (access.proxy == Proxy::generic && !landing_) {
    TraceEvent*& open = open_accesses_[{warp(), write, access.where.line(), access.where.file_name()}];
    if (!open) {
      ++steps_;
      trace_.push_back({steps_ - first_step_, 0, access.actor < size_ * threads_ ? access.actor % threads_ : thread(), write ? "write" : "read", access.where, "", {}});
      open = &trace_.back();
    }
    open->until = steps_ - first_step_;
    into = open;
  }
  if (!into) return;
  for (std::uint32_t line = offset / kTraceLine; line <= (offset + bytes - 1) / kTraceLine; ++line) into->lines.insert(line);
}

void Machine::run_blocks() {
  first_step_ = steps_;
  open_accesses_.clear();
  const float unwritten = as_float(kUnwritten);
  blocks_.assign(size_, Block{});
  for (int rank = 0; rank < size_; ++rank) {
    Block& block = blocks_[rank];
    block.rank = rank;
    block.index = block_index(settings_.cooperative ? rank / cluster_size_ : static_cast<unsigned>(number_),
                              static_cast<unsigned>(rank % cluster_size_));
    block.smem.resize(smem_bytes_);
    for (std::uint32_t i = 0; i + 4 <= smem_bytes_; i += 4) std::memcpy(&block.smem[i], &unwritten, 4);
    block.shadow.assign(smem_bytes_ / 4 + 1, Shadow{});
    block.marked.assign(smem_bytes_ / 4 + 1, 1);
    block.named.assign(16, NamedBarrier{});
    block.gatherings.assign(warps_, Gathering{});
    block.queues.assign(warps_, TensorQueue{});
    block.warpgroups.assign((warps_ + 3) / 4, Warpgroup{});
  }
  origins_.clear();
  copies_.clear();
  stores_.clear();
  late_actors_.clear();
  cluster_barriers_.assign(size_ / cluster_size_, NamedBarrier{});
  alive_in_cluster_.assign(size_ / cluster_size_, cluster_size_ * threads_);
  fibers_.clear();
  for (int i = 0; i < size_ * threads_; ++i) {
    auto fiber = std::make_unique<Fiber>();
    fiber->block = i / threads_;
    fiber->thread = i % threads_;
    fiber->view = fresh_view();
    fiber->view.seen[i] = 1;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stacks_ + kStack * i;
    fiber->context.uc_stack.ss_size = kStack;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, reinterpret_cast<void (*)()>(&Machine::enter), 0);
    fibers_.push_back(std::move(fiber));
  }
  alive_ = size_ * threads_;
  schedule();
  if (!fault_.empty()) return;
  for (const Block& block : blocks_) {
    current_ = fibers_[block.rank * threads_].get();
    for (const TensorQueue& q : block.queues) {
      if (q.open.empty() && q.committed.empty()) continue;
      report(Where::current(), "a warp ends with wgmma that nobody waited for");
      return;
    }
    for (const auto& [address, bar] : block.mbarriers) {
      if (bar.bytes == 0) continue;
      report(bar.init.where, ("the mbarrier at " + std::to_string(address - kSharedBase) + " ends with " +
                              std::to_string(bar.bytes) + " bytes that were expected and not copied").c_str());
      return;
    }
  }
  current_ = nullptr;
}

Dim3 Machine::block_index(unsigned cluster, unsigned rank) const {
  const unsigned x = grid_.x / cluster_.x, y = grid_.y / cluster_.y;
  return {cluster % x * cluster_.x + rank % cluster_.x, cluster / x % y * cluster_.y + rank / cluster_.x % cluster_.y,
          cluster / x / y * cluster_.z + rank / cluster_.x / cluster_.y};
}

void Machine::finish() {
  Fiber& self = *current_;
  if (!self.stores.open.empty() || self.stores.read < self.stores.groups) {
    fail(self.stores.where, "a thread ends with bulk stores whose reading nobody waited for");
  }
  if (!self.copies.waited) fail(self.copies.where, "a thread ends with asynchronous copies that it has not waited for");
  if (self.cluster_arrived) fail(Where::current(), "a thread ends between arrival and wait at the cluster barrier");
  self.finished = true;
  home().gatherings[warp()].exited = true;
  --alive_;
  --alive_in_cluster_[self.block / cluster_size_];
  settle_cluster();
}

void Machine::schedule() {
  std::vector<Fiber*> runnable;
  while (fault_.empty()) {
    runnable.clear();
    for (auto& fiber : fibers_) {
      if (!fiber->finished && (!fiber->ready || fiber->ready())) runnable.push_back(fiber.get());
    }
    if (alive_ == 0) {
      while (!copies_.empty() && fault_.empty()) attempt([this] { land_copy(random_() % copies_.size()); });
      while (!stores_.empty() && fault_.empty()) attempt([this] { land_store(random_() % stores_.size(), true); });
      return;
    }
    if (settings_.mode == 2) attempt([this] { land_some_matmuls(); });
    if (!stores_.empty() && (runnable.empty() || (settings_.mode == 2 && random_() % 4 == 0))) {
      attempt([this, all = runnable.empty()] { land_store(random_() % stores_.size(), all || random_() % 2 == 0); });
      if (runnable.empty()) continue;
    }
    if (!copies_.empty() && (runnable.empty() || (settings_.mode == 2 && random_() % 4 == 0))) {
      attempt([this] { land_copy(random_() % copies_.size()); });
      if (runnable.empty()) continue;
    }
    if (runnable.empty()) {
      if (fault_.empty()) deadlock();
      return;
    }
    // One warp at a time, in an order of the seed: its lanes run until each has to wait.
    const Fiber* chosen = runnable[random_() % runnable.size()];
    for (Fiber* fiber : runnable) {
      if (fiber->block != chosen->block || fiber->thread / kWarp != chosen->thread / kWarp || !fault_.empty()) continue;
      ++steps_;
      resume(*fiber);
    }
  }
}

void Machine::land_copy(std::size_t i) {
  Copy copy = std::move(copies_[i]);
  copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(i));
  Fiber* const before = current_;
  current_ = copy.fiber;
  copy.land();
  current_ = before;
}

void Machine::advance(Store& store, bool whole) {
  if (store.read) std::exchange(store.read, nullptr)();
  if (whole && store.write) std::exchange(store.write, nullptr)();
}

void Machine::land_store(std::size_t i, bool whole) {
  const auto [store, fiber] = stores_[i];
  Fiber* const before = current_;
  current_ = fiber;
  advance(*store, whole);
  current_ = before;
  if (!store->write) stores_.erase(stores_.begin() + static_cast<std::ptrdiff_t>(i));
}

void Machine::land(Matmul& m) {
  if (!m.land) return;
  const std::function<void()> operation = std::move(m.land);
  m.land = nullptr;
  operation();
}

void Machine::land_some_matmuls() {
  const int w = static_cast<int>(random_() % (warps_ * size_));
  Block& block = blocks_[w / warps_];
  for (MatmulGroup& group : block.queues[w % warps_].committed) {
    for (Matmul& m : group.operations) {
      if (!m.land) continue;
      if (random_() % 3 == 0) return;
      Fiber* const before = current_;
      current_ = fibers_[block.rank * threads_ + w % warps_ * kWarp].get();
      land(m);
      current_ = before;
      if (!fault_.empty()) return;
    }
  }
}

void Machine::settle(Mbarrier& bar, const Where& where) {
  if (bar.pending != 0 || bar.bytes != 0) return;
  event("phase", where, {{"mbarrier", bar.address}, {"phase", bar.phase}});
  bar.pending = bar.count;
  ++bar.phase;
  bar.gathering.seen[bar.actor] = bar.phase;
  bar.completed.join_with(bar.gathering);
}

void Machine::settle_cluster() {
  NamedBarrier& bar = cluster_barrier(current_->block);
  if (bar.arrived == 0 || bar.arrived < alive_in_cluster_[current_->block / cluster_size_]) return;
  bar.arrived = 0;
  bar.released = bar.gathering;
  ++bar.generation;
}

void Machine::require_alive(const Block& block, const Where& where) {
  if (cluster_size_ == 1) return;
  for (int t = 0; t < threads_; ++t) {
    if (!fibers_[block.rank * threads_ + t]->finished) return;
  }
  fail(where, "access to shared memory of the block%s, which has exited", of_block(block.rank).c_str());
}

Released Machine::released() const {
  Released r;
  if (current_->view.others) r.seen = *current_->view.others;
  join(r.seen[number_], current_->view.seen);
  join(r.fenced[number_], current_->view.fenced);
  return r;
}

void Machine::take_over(const Released& found) {
  View& mine = view();
  if (auto own = found.seen.find(number_); own != found.seen.end()) join(mine.seen, own->second);
  if (auto own = found.fenced.find(number_); own != found.fenced.end()) join(mine.fenced, own->second);
  mine.join_others(std::make_shared<const Clocks>(found.seen));
  ++mine.version;
}

void Machine::resume(Fiber& fiber) {
  current_ = &fiber;
  if (_setjmp(scheduler_) == 0) {
    if (!fiber.started) {
      fiber.started = true;
      setcontext(&fiber.context);
    }
    _longjmp(fiber.jump, 1);
  }
  current_ = nullptr;
}

void Machine::require_order(const Access& before, const char* kind, const Access& now, bool write, const View& view,
                   std::uint32_t word) {
  const bool ordered = has_seen(view.seen, before.actor, before.clock);
  const bool crosses = before.proxy == Proxy::generic && now.proxy == Proxy::async && std::strcmp(kind, "write") == 0;
  if (ordered && (!crosses || has_seen(view.fenced, before.actor, before.clock))) return;
  char text[512];
  std::snprintf(text, sizeof text, "shared memory race at byte %u: this %s%s by %s, and the %s%s by %s at %s, %s", word * 4,
                now.proxy == Proxy::async ? "asynchronous " : "", write ? "write" : "read", actor_name(now.actor).c_str(),
                before.proxy == Proxy::async ? "asynchronous " : "", kind, actor_name(before.actor).c_str(),
                place(before.where).c_str(),
                ordered ? "have no fence.proxy.async between them" : "are not ordered by any barrier or wait");
  report(now.where, text);
  abandon();
}

std::string Machine::actor_name(int actor) const {
  if (actor >= actors_) {
    const auto& [what, of] = late_actors_[actor - actors_];
    return std::string(what) + " of thread " + std::to_string(of->thread) + of_block(of->block);
  }
  if (actor < size_ * threads_) {
    const int thread = actor % threads_;
    return "thread " + std::to_string(thread) + " (warp " + std::to_string(thread / kWarp) + ")" + of_block(actor / threads_);
  }
  actor -= size_ * threads_;
  if (actor < size_ * warps_) return "wgmma of warp " + std::to_string(actor % warps_) + of_block(actor / warps_);
  actor -= size_ * warps_;
  return "TMA on mbarrier " + std::to_string(actor % kMaxBarriers) + of_block(actor / kMaxBarriers);
}

std::string Machine::of_block(int rank) const {
  if (size_ == 1) return "";
  if (size_ == cluster_size_) return " of rank " + std::to_string(rank);
  const Dim3& at = blocks_[rank].index;
  return " of block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

void Machine::report(const Where& where, const char* text) {
  if (!fault_.empty()) return;
  const Dim3 at = block();
  fault_ = place(where) + ": block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) +
           "), warp " + std::to_string(warp()) + ", thread " + std::to_string(thread()) + ": ";
  fault_ += text;
}

void Machine::deadlock() {
  std::map<std::string, std::vector<std::string>> waiting;
  const Fiber* first = nullptr;
  for (const auto& fiber : fibers_) {
    if (fiber->finished) continue;
    if (!first) first = fiber.get();
    const std::string warp = std::to_string(fiber->thread / kWarp) + of_block(fiber->block);
    auto& warps = waiting[place(fiber->waiting_at) + " waits for " + fiber->waiting_for()];
    if (warps.empty() || warps.back() != warp) warps.push_back(warp);
  }
  std::string text = "deadlock:";
  for (const auto& [what, warps] : waiting) {
    text += "\n  warp";
    for (const std::string& warp : warps) text += " " + warp;
    text += " at " + what;
  }
  for (const Block& block : blocks_) {
    for (const auto& [address, bar] : block.mbarriers) {
      text += "\n  mbarrier at " + std::to_string(address - kSharedBase) + of_block(block.rank) + ": phase " +
              std::to_string(bar.phase) + ", " + std::to_string(bar.pending) + " of " + std::to_string(bar.count) +
              " arrivals and " + std::to_string(bar.bytes) + " bytes missing";
    }
    for (std::size_t id = 0; id < block.named.size(); ++id) {
      if (block.named[id].arrived) {
        text += "\n  named barrier " + std::to_string(id) + of_block(block.rank) + ": " +
                std::to_string(block.named[id].arrived) + " of " + std::to_string(block.named[id].expected) + " threads";
      }
    }
  }
  for (std::size_t i = 0; i < cluster_barriers_.size(); ++i) {
    if (!cluster_barriers_[i].arrived) continue;
    text += "\n  cluster barrier: " + std::to_string(cluster_barriers_[i].arrived) + " of " +
            std::to_string(alive_in_cluster_[i]) + " threads";
  }
  current_ = fibers_[first->block * threads_ + first->thread].get();
  report(first->waiting_at, text.c_str());
}

std::string Machine::who() const {
  const Dim3 at = block();
  return "warp " + std::to_string(warp()) + " of block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
         std::to_string(at.z) + ")";
}

std::string Machine::describe(Mark mark, std::uint32_t address) const {
  const std::string byte = "byte " + std::to_string(address - kSharedBase) + " of shared memory";
  if (mark == kUnwritten) return byte + ", which is uninitialised so far";
  const std::string& text = origin(mark).text;
  return is_raw(mark) ? byte + ", which is uninitialised (" + text + ")" : "what is undefined (" + text + ")";
}

const Region& Machine::region_of(const void* pointer) const {
  const auto address = reinterpret_cast<std::uint64_t>(pointer);
  return *std::find_if(regions_.begin(), regions_.end(), [address](const Region& region) {
    return address >= region.address && address < region.address + region.bytes;
  });
}

Machine::Writers& Machine::kept_writers(const Settings& settings) {
  if (!*settings.writers) *settings.writers = new Writers;
  return *static_cast<Writers*>(*settings.writers);
}

bool Machine::knows_of(const Writer& w) const {
  const View& mine = current_->view;
  if (w.cluster == number_) return has_seen(mine.seen, w.access.actor, w.access.clock);
  if (!mine.others) return false;
  const auto found = mine.others->find(w.cluster);
  return found != mine.others->end() && has_seen(found->second, w.access.actor, w.access.clock);
}

bool Machine::track_global(std::uint64_t address, std::uint64_t bytes, bool write, const Region& region, const Where& where,
                  const Manner& manner) {
  if (!region.writable) return false;
  bool unwritten = false;
  const Access access = manner.async ? *manner.async : Access{actor(), view().seen[actor()], Proxy::generic, where};
  for (std::uint64_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    auto found = writers_.find(word);
    if (found != writers_.end()) {
      const Writer& w = found->second;
      const bool elsewhere = w.cluster != number_ || w.rank != current_->block;
      const bool settled = (w.atomic && manner.atomic) || (manner.async && w.access.actor == access.actor);
      if (w.kernel == settings_.kernel && (elsewhere || w.access.proxy == Proxy::async) && !settled && !knows_of(w)) {
        fail(where, "%s is %s here and was written by %s at %s", region.name, write ? "written" : "read",
             elsewhere ? "another block of this kernel" : "a bulk store that nobody waited for,",
             place(w.access.where).c_str());
      }
      if (settings_.overlap && w.kernel == settings_.kernel - 1 && !current_->overlap_waited) {
        fail(where, "%s was written by the kernel before, at %s, and this thread has not waited for its end", region.name,
             place(w.access.where).c_str());
      }
    } else if ((!write || manner.atomic) && !region.defined) {
      unwritten = true;
    }
    if (write) writers_[word] = {settings_.kernel, number_, current_->block, access, manner.atomic};
  }
  return unwritten;
}

void Machine::write_trace() const {
  std::FILE* file = std::fopen(settings_.trace_file, "w");
  if (!file) return;
  for (const TraceEvent& e : trace_) {
    std::fprintf(file, "%lu\t%lu\t%d\t%s\t%s\t%s\t", static_cast<unsigned long>(e.time),
                 static_cast<unsigned long>(e.until), e.thread, e.what, place(e.where).c_str(), e.arguments.c_str());
    // Successive lines as a range of bytes.
    for (auto line = e.lines.begin(); line != e.lines.end();) {
      const std::uint32_t first = *line;
      std::uint32_t last = first;
      while (++line != e.lines.end() && *line == last + 1) ++last;
      std::fprintf(file, "%s%u-%u", first == *e.lines.begin() ? "" : ",", first * kTraceLine, (last + 1) * kTraceLine);
    }
    std::fputc('\n', file);
  }
  std::fclose(file);
}

void Machine::enter() {
  (*machine->kernel_)();
  if (machine->lane() == 0) machine->event("exit", Where::current());
  machine->finish();
  machine->abandon();
}

int launch(const std::function<void()>& kernel, const Settings& settings, Dim3 grid, Dim3 cluster, int threads,
           std::uint32_t smem, std::vector<Region> regions, char* fault, std::size_t fault_size) {
  Machine here(settings, grid, cluster, threads, smem, std::move(regions));
  machine = &here;
  const std::string text = here.run(kernel);
  machine = nullptr;
  std::snprintf(fault, fault_size, "%s", text.c_str());
  return text.empty() ? 0 : 1;
}

}  // namespace mlaforge::sim
