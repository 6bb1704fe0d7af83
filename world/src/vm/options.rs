//! What machines are made of.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::image;
use crate::provider::Error;

/// Memory that the kernel, Postgres and the agent need, MiB.
const MEMORY_MIB_MIN: u32 = 384;

edge::options! {
    /// The image and the size of machines.
    #[derive(Eq)]
    pub struct Options {
        /// Folder that `make world-image` wrote.
        pub image: PathBuf = ".springtide/world-image".into(),
        /// What runs the machine's processor: `kvm`, or `tcg`, which is emulation, slower and a
        /// weaker boundary.
        pub accelerator: Accelerator = Accelerator::Kvm,
        /// Memory of a world, with what it writes to its disk, MiB; at least 384. A fork takes only
        /// the part that it changed.
        pub memory_mib: u32 = 512 => MEMORY_MIB_MIN..,
        /// How much of its memory a world may fill with files, MiB.
        pub disk_mib: u32 = 192,
        /// Processors of a world, 1 to 16.
        pub cpus: u32 = 1 => 1..=16,
        /// A program with its arguments, such as ["bash", "-c", "…"], that runs once before worlds
        /// are forked: what it leaves, every world finds.
        pub setup: Vec<String> = Vec::new(),
    }
}

/// What runs the machine's processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The processor itself, through `/dev/kvm`.
    Kvm,
    /// A program of QEMU. It runs everywhere, several times slower. QEMU's authors do not promise that it
    /// holds what attacks it; around it are still a seccomp filter and namespaces.
    Tcg,
}

impl Options {
    /// Refuses values out of range. Does not look at the machine.
    pub fn check(&self) -> Result<(), Error> {
        let unusable = |text: String| Err(Error::Unusable(text));
        if let Err(error) = self.check_ranges("") {
            return unusable(error.into());
        }
        if self.disk_mib == 0 || self.disk_mib >= self.memory_mib {
            return unusable(format!(
                "disk_mib is {}: files are in the world's memory, so give 1 to memory_mib - 1",
                self.disk_mib
            ));
        }
        Ok(())
    }

    /// Refuses what this machine cannot run.
    pub(super) fn check_host(&self) -> Result<(), Error> {
        self.check()?;
        image::check(&self.image)?;
        if self.accelerator == Accelerator::Kvm {
            let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
            if let Some(reason) = no_kvm(&processor, device.err().as_ref()) {
                return Err(Error::Unusable(format!(
                    "accelerator is \"kvm\", but {reason}; or set accelerator to \"tcg\", which is slower and a weaker \
                     boundary"
                )));
            }
        }
        Ok(())
    }
}

/// Why machines cannot use KVM, and what to do.
fn no_kvm(processor: &str, device: Option<&std::io::Error>) -> Option<String> {
    if let Some(error) = device {
        return Some(format!(
            "/dev/kvm cannot be opened ({error}): load the module kvm_intel or kvm_amd, and add this user to the group kvm"
        ));
    }
    let flags = processor.lines().filter(|line| line.starts_with("flags"));
    let virtualizes = flags
        .flat_map(str::split_whitespace)
        .any(|flag| flag == "vmx" || flag == "svm");
    (!virtualizes).then(|| {
        "the processor shows neither vmx nor svm, so /dev/kvm runs only kernels made for it: enable (nested) \
         virtualization"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_out_of_range_are_refused() {
        assert!(Options::default().check().is_ok());
        for (change, field) in [
            (
                Options {
                    memory_mib: 100,
                    ..Options::default()
                },
                "memory_mib",
            ),
            (
                Options {
                    disk_mib: 512,
                    ..Options::default()
                },
                "disk_mib",
            ),
            (
                Options {
                    cpus: 0,
                    ..Options::default()
                },
                "cpus",
            ),
        ] {
            let why = change.check().unwrap_err().to_string();
            assert!(why.contains(field), "{why}");
        }
    }

    #[test]
    fn kvm_needs_the_device_and_a_processor_that_virtualizes() {
        assert_eq!(no_kvm("flags\t\t: fpu svm sse\n", None), None);
        assert_eq!(no_kvm("flags\t\t: fpu vmx sse\n", None), None);
        assert!(
            no_kvm("flags\t\t: fpu sse\nvmx flags : x\n", None)
                .unwrap()
                .contains("vmx")
        );
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        assert!(no_kvm("flags : svm", Some(&missing)).unwrap().contains("/dev/kvm"));
    }

    #[test]
    fn a_missing_image_says_what_makes_one() {
        let options = Options {
            image: "/nonexistent".into(),
            ..Options::default()
        };
        assert!(
            options
                .check_host()
                .unwrap_err()
                .to_string()
                .contains("make world-image")
        );
    }
}
