// Devices of type "cuda" whose memory is the host's: what the source files of the emulation share. With
// EMULATED_OTHER they are of the type that torch keeps for the backends of others, PrivateUse1.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>

namespace emulated {

using c10::DeviceIndex;

#ifdef EMULATED_OTHER
#define EMULATED_KEY PrivateUse1
constexpr auto kType = c10::DeviceType::PrivateUse1;
#else
#define EMULATED_KEY CUDA
constexpr auto kType = c10::DeviceType::CUDA;
#endif
constexpr auto kKey = c10::DispatchKey::EMULATED_KEY;

constexpr int kMaxDevices = 2;

// What is reported to Python. The order is that of `KINDS` in cuda_recording.py.
enum Kind : int {
  kSync,      // the host waits for the device
  kEvent,     // the host waits for an event that has not been seen to be complete
  kPageable,  // a copy to the device from memory that is not pinned
  kUpload,    // an asynchronous copy to the device, from pinned memory
  kDownload,  // an asynchronous copy to pinned memory
  kDevice,    // the first use of a device by a thread
  kRace,      // pinned memory was written before an asynchronous copy had read it
};

void report(Kind kind, const char* what, DeviceIndex device);

// ---- devices ----

int device_count();
DeviceIndex current_device();
// Changes the calling thread's current device without using it.
void set_current_device(DeviceIndex device);
// Notes that the calling thread used a device: on a GPU, its context exists from then on.
void touch(DeviceIndex device);
bool has_context(DeviceIndex device);

// ---- memory ----

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
// Counts memory of a device that came from elsewhere. Raises OutOfMemoryError if the device has not that much.
void take_memory(DeviceIndex device, std::size_t num_bytes);
void give_memory(DeviceIndex device, std::size_t num_bytes);

// ---- asynchronous copies ----

c10::Stream current_stream(DeviceIndex device);
// Keeps work of a stream until the host waits for it, or has seen that it is complete.
void defer(c10::Stream stream, std::function<void()> work);
// Waits for a stream, and reports that under the name `what`.
void synchronize(c10::Stream stream, const char* what);

}  // namespace emulated
