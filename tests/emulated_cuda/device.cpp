// Devices, memory, streams and events. Kernels run at once on the calling thread; only copies between the host and
// pinned memory are kept back, until the host has waited for them or has seen that they are complete. So a program that
// reads such memory too early reads old values, as it may on a GPU.
#include "emulated.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace emulated {
namespace {

using c10::Device;
using c10::Stream;

// ---- reports ----

using Listener = void (*)(int kind, const char* what, int device);
std::atomic<Listener> listener{nullptr};

// ---- devices ----

thread_local DeviceIndex current = 0;
std::atomic<unsigned> contexts{0};
// A new value makes each thread report its devices again.
std::atomic<unsigned> generation{1};
thread_local unsigned seen_generation = 0;
thread_local unsigned seen_devices = 0;

// ---- memory ----

std::atomic<std::size_t> total_bytes{std::size_t{80} << 30};
std::atomic<std::size_t> allocated[kMaxDevices];
std::atomic<std::size_t> peak[kMaxDevices];

std::mutex pinned_mutex;
std::map<const char*, std::size_t> pinned;  // start -> size

void pin(void* start, std::size_t num_bytes) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  pinned[static_cast<const char*>(start)] = num_bytes;
}

void unpin(void* start) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  pinned.erase(static_cast<const char*>(start));
}

void* aligned(std::size_t num_bytes) {
  void* start = nullptr;
  TORCH_CHECK(!num_bytes || !posix_memalign(&start, 64, num_bytes), "the host has no ", num_bytes, " bytes");
  return start;
}

struct Block {
  void* start;
  std::size_t num_bytes;
  DeviceIndex device;
};

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t num_bytes) override {
    touch(current);
    take_memory(current, num_bytes);
    auto* block = new Block{aligned(num_bytes), num_bytes, current};
    return {block->start, block, &release, Device(kType, current)};
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& all = (*each)[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = static_cast<int64_t>(allocated[device].load());
      all.peak = static_cast<int64_t>(peak[device].load());
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { peak[device] = allocated[device].load(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(DeviceIndex device) override {
    return {total_bytes - allocated[device], total_bytes};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    give_memory(block->device, block->num_bytes);
    std::free(block->start);
    delete block;
  }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t num_bytes) override {
    // As torch does: a device that has a context already is taken rather than the current one.
    if (!contexts) touch(current);
    void* start = aligned(num_bytes);
    if (start) pin(start, num_bytes);
    return {start, start, &release, Device(c10::kCPU)};
  }
  static void release(void* start) {
    if (start) unpin(start);
    std::free(start);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

DeviceAllocator the_device_allocator;
REGISTER_ALLOCATOR(kType, &the_device_allocator)
PinnedAllocator the_pinned_allocator;

// ---- streams and events ----

using StreamKey = std::pair<DeviceIndex, c10::StreamId>;
// For each stream, the number of the last work that is known to come before.
using Clock = std::map<StreamKey, long>;

struct Event {
  Clock clock;
  bool was_asked = false;
  bool is_complete = false;
};

struct Work {
  StreamKey stream;
  long number;
  std::function<void()> run;
};

// Guards all below. Recursive, since running work may free tensors.
std::recursive_mutex streams_mutex;
std::map<StreamKey, Clock> clocks;
std::deque<Work> waiting;
long last_number = 0;
std::atomic<c10::StreamId> last_stream{0};
thread_local c10::StreamId stream_ids[kMaxDevices] = {};
// A GPU completes its work even if the host does not wait for it.
constexpr std::size_t kMostWaiting = 256;

StreamKey key_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, number] : other) into[stream] = std::max(into[stream], number);
}

void run_until(const Clock& clock) {
  std::vector<Work> due;
  {
    std::lock_guard<std::recursive_mutex> guard(streams_mutex);
    for (auto work = waiting.begin(); work != waiting.end();) {
      auto known = clock.find(work->stream);
      if (known != clock.end() && work->number <= known->second) {
        due.push_back(std::move(*work));
        work = waiting.erase(work);
      } else {
        ++work;
      }
    }
  }
  for (auto& work : due) work.run();
}

Clock clock_of(const StreamKey& stream) {
  std::lock_guard<std::recursive_mutex> guard(streams_mutex);
  Clock clock = clocks[stream];
  clock[stream] = last_number;
  return clock;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }
  Device getDevice() const override { return Device(kType, current); }
  Device exchangeDevice(Device device) const override {
    Device before(kType, current);
    if (device.has_index() && device.index() != current) {
      touch(device.index());
      current = device.index();
    }
    return before;
  }
  // Neither of the next two is a use of the device: a guard restores the device only if that has a context, and
  // autograd's engine, as it is built for CUDA, gives its threads only such devices.
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }

  Stream getStream(Device device) const override { return current_stream(device.has_index() ? device.index() : current); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override {
    touch(device.index());
    return Stream(Stream::UNSAFE, device, ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = current_stream(stream.device_index());
    stream_ids[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream.id()));
  }
  bool queryStream(const Stream& stream) const override {
    run_until(clock_of(key_of(stream)));
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { synchronize(stream, "stream"); }
  void synchronizeDevice(DeviceIndex device) const override {
    touch(device);
    report(kSync, "device", device);
    Clock everything;
    {
      std::lock_guard<std::recursive_mutex> guard(streams_mutex);
      for (const auto& work : waiting)
        if (work.stream.first == device) everything[work.stream] = last_number;
    }
    run_until(everything);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    touch(stream.device_index());
    if (!*event) *event = new Event;
    auto* recorded = static_cast<Event*>(*event);
    *recorded = Event{clock_of(key_of(stream))};
  }
  void block(void* event, const Stream& stream) const override {
    touch(stream.device_index());
    if (!event) return;
    std::lock_guard<std::recursive_mutex> guard(streams_mutex);
    merge(clocks[key_of(stream)], static_cast<Event*>(event)->clock);
  }
  // An event is never complete when it is first asked for, which is what a program has to be able to deal with.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    touch(current);
    auto* recorded = static_cast<Event*>(event);
    if (!recorded->is_complete && !std::exchange(recorded->was_asked, true)) return false;
    complete(*recorded);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    touch(current);
    auto* recorded = static_cast<Event*>(event);
    if (!recorded->is_complete) report(kEvent, "event", current);
    complete(*recorded);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }

  static void complete(Event& event) {
    run_until(event.clock);
    event.is_complete = true;
  }
};
C10_REGISTER_GUARD_IMPL(EMULATED_KEY, Guard)

}  // namespace

void report(Kind kind, const char* what, DeviceIndex device) {
  if (auto tell = listener.load()) tell(kind, what, device);
}

int device_count() {
  static const int count = [] {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return kMaxDevices;
    int named = *visible ? 1 : 0;
    for (; *visible; ++visible) named += *visible == ',';
    return std::min(named, kMaxDevices);
  }();
  return count;
}

DeviceIndex current_device() { return current; }

void set_current_device(DeviceIndex device) { current = device; }

bool has_context(DeviceIndex device) { return contexts >> device & 1; }

void touch(DeviceIndex device) {
  contexts |= 1u << device;
  if (seen_generation != generation) {
    seen_generation = generation;
    seen_devices = 0;
  }
  if (seen_devices >> device & 1) return;
  seen_devices |= 1u << device;
  report(kDevice, "device", device);
}

c10::Allocator* device_allocator() { return &the_device_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return false;
  auto [start, num_bytes] = *std::prev(after);
  return static_cast<const char*>(pointer) < start + num_bytes;
}

void take_memory(DeviceIndex device, std::size_t num_bytes) {
  std::size_t used = allocated[device] += num_bytes;
  if (used > total_bytes) {
    allocated[device] -= num_bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", num_bytes, " bytes.");
  }
  std::size_t known = peak[device];
  while (known < used && !peak[device].compare_exchange_weak(known, used)) {
  }
}

void give_memory(DeviceIndex device, std::size_t num_bytes) { allocated[device] -= num_bytes; }

Stream current_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(kType, device), stream_ids[device]);
}

void defer(Stream stream, std::function<void()> work) {
  std::vector<Work> due;
  {
    std::lock_guard<std::recursive_mutex> guard(streams_mutex);
    waiting.push_back({key_of(stream), ++last_number, std::move(work)});
    while (waiting.size() > kMostWaiting) {
      due.push_back(std::move(waiting.front()));
      waiting.pop_front();
    }
  }
  for (auto& late : due) late.run();
}

void synchronize(Stream stream, const char* what) {
  touch(stream.device_index());
  report(kSync, what, stream.device_index());
  run_until(clock_of(key_of(stream)));
}

}  // namespace emulated

// ---- for Python, through ctypes ----

using namespace emulated;

extern "C" {
void emulated_listen(void (*tell)(int, const char*, int)) {
  listener = tell;
  ++generation;
}
int emulated_device_count() { return device_count(); }
int emulated_device() { return current; }
void emulated_set_device(int device) {
  touch(static_cast<DeviceIndex>(device));
  current = static_cast<DeviceIndex>(device);
}
int emulated_exchange_device(int device) {
  Device before = Guard().exchangeDevice(Device(kType, static_cast<DeviceIndex>(device)));
  return before.index();
}
int emulated_restore_device(int device) {
  return std::exchange(current, static_cast<DeviceIndex>(device));
}
int emulated_has_context(int device) { return has_context(static_cast<DeviceIndex>(device)); }
void emulated_synchronize() { Guard().synchronizeDevice(current); }
long emulated_stream(int device) { return stream_ids[device]; }
void emulated_set_stream(int device, long stream) {
  current = static_cast<DeviceIndex>(device);
  stream_ids[device] = stream;
}
long emulated_new_stream() { return Guard().getNewStream(Device(kType, current), 0).id(); }
std::size_t emulated_total() { return total_bytes; }
void emulated_set_total(std::size_t num_bytes) { total_bytes = num_bytes; }
std::size_t emulated_allocated(int device) { return allocated[device]; }
std::size_t emulated_peak(int device) { return peak[device]; }
void emulated_reset_peak(int device) { peak[device] = allocated[device].load(); }
void emulated_pin(void* start, std::size_t num_bytes) { pin(start, num_bytes); }
void emulated_unpin(void* start) { unpin(start); }
}
