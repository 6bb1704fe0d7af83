//! A private certificate authority for one test.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use openssl::asn1::Asn1Time;
use openssl::bn::{BigNum, MsbOption};
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::x509::extension::{BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectAlternativeName};
use openssl::x509::{X509, X509Builder, X509NameBuilder};

pub struct Authority {
    certificate: X509,
    key: PKey<Private>,
}

/// A certificate and its key, as PEM.
pub struct Issued {
    pub certificate: Vec<u8>,
    pub key: Vec<u8>,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let key = new_key();
        let mut builder = builder(name, &key);
        let basic = BasicConstraints::new().critical().ca().build().unwrap();
        let usage = KeyUsage::new().critical().key_cert_sign().crl_sign().build().unwrap();
        builder.append_extension(basic).unwrap();
        builder.append_extension(usage).unwrap();
        let subject = name_of(name);
        builder.set_issuer_name(&subject).unwrap();
        builder.sign(&key, MessageDigest::sha256()).unwrap();
        Self {
            certificate: builder.build(),
            key,
        }
    }

    /// For servers and clients, valid for these host names and addresses.
    pub fn issue(&self, names: &[&str]) -> Issued {
        let key = new_key();
        let mut builder = builder(names[0], &key);
        builder.set_issuer_name(self.certificate.subject_name()).unwrap();
        let mut alternative = SubjectAlternativeName::new();
        for name in names {
            match name.parse::<IpAddr>() {
                Ok(_) => alternative.ip(name),
                Err(_) => alternative.dns(name),
            };
        }
        let context = builder.x509v3_context(Some(&self.certificate), None);
        let alternative = alternative.build(&context).unwrap();
        let usage = ExtendedKeyUsage::new().server_auth().client_auth().build().unwrap();
        builder.append_extension(alternative).unwrap();
        builder.append_extension(usage).unwrap();
        builder.sign(&self.key, MessageDigest::sha256()).unwrap();
        Issued {
            certificate: builder.build().to_pem().unwrap(),
            key: key.private_key_to_pem_pkcs8().unwrap(),
        }
    }

    pub fn pem(&self) -> Vec<u8> {
        self.certificate.to_pem().unwrap()
    }

    /// Writes its certificate to `folder` as `name`.
    pub fn write(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, self.pem()).unwrap();
        path
    }
}

impl Issued {
    /// Writes `name.pem` and `name.key` to `folder`.
    pub fn write(&self, folder: &Path, name: &str) -> (PathBuf, PathBuf) {
        let (certificate, key) = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
        std::fs::write(&certificate, &self.certificate).unwrap();
        std::fs::write(&key, &self.key).unwrap();
        (certificate, key)
    }
}

fn new_key() -> PKey<Private> {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap()
}

fn name_of(name: &str) -> openssl::x509::X509Name {
    let mut builder = X509NameBuilder::new().unwrap();
    builder.append_entry_by_text("CN", name).unwrap();
    builder.build()
}

/// A certificate for `key` that lacks its issuer and extensions.
fn builder(name: &str, key: &PKey<Private>) -> X509Builder {
    let mut builder = X509Builder::new().unwrap();
    builder.set_version(2).unwrap(); // X.509 v3
    let mut serial = BigNum::new().unwrap();
    serial.rand(120, MsbOption::MAYBE_ZERO, false).unwrap();
    let serial = serial.to_asn1_integer().unwrap();
    builder.set_serial_number(&serial).unwrap();
    builder.set_subject_name(&name_of(name)).unwrap();
    builder.set_pubkey(key).unwrap();
    builder.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::days_from_now(2).unwrap()).unwrap();
    builder
}
