// Guard that tells torch's C++ code the current simulated device. A CPU build of torch has no CUDA guard, so
// this guard can be registered and removed again.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
c10::DeviceIndex current = 0;
c10::DeviceIndex count = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(CUDA, current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return count; }
};

const Guard guard;

} // namespace

extern "C" {

void put_in_place(int devices) {
  current = 0;
  count = static_cast<c10::DeviceIndex>(devices);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
}

void take_away() {
  count = 0;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(nullptr);
}

int current_device() { return current; }

void set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }

}
