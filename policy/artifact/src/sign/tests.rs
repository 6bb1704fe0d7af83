use super::envelope::pre_authentication_encoding;
use super::*;

#[test]
fn the_pre_authentication_encoding_is_dsse_s() {
    // the example of the DSSE protocol document
    assert_eq!(
        pre_authentication_encoding("http://example.com/HelloWorld", b"hello world"),
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    );
}

#[test]
fn a_key_is_made_once_and_trusted_by_its_public_half() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    let key = SigningKey::load_or_create(&path, "trainer").unwrap();
    let again = SigningKey::load_or_create(&path, "trainer").unwrap();
    assert_eq!(key.key_id(), again.key_id());
    let other = SigningKey::load_or_create(&path, "release").unwrap();
    assert_ne!(key.key_id(), other.key_id());
    let trusted = TrustedKeys::load(&path).unwrap();
    assert_eq!(trusted.len(), 2);
    let envelope = Envelope::sign("manifest", b"{}", &key);
    let envelope = Envelope::from_bytes(&envelope.to_bytes().unwrap()).unwrap();
    assert_eq!(envelope.verify("manifest", &trusted).unwrap(), b"{}");
}

#[test]
fn another_type_another_key_and_any_changed_byte_are_refused() {
    let key = SigningKey::from_seed(&[1; 32]);
    let stranger = SigningKey::from_seed(&[2; 32]);
    let envelope = Envelope::sign("manifest", b"{\"version\":7}", &key);
    assert!(envelope.verify("assignment", &key.trusted()).is_err());
    assert!(matches!(
        envelope.verify("manifest", &stranger.trusted()),
        Err(Error::Untrusted)
    ));
    assert!(envelope.verify("manifest", &TrustedKeys::default()).is_err());
    let mut forged = envelope.clone();
    forged.signatures[0].keyid = stranger.key_id().into();
    assert!(forged.verify("manifest", &stranger.trusted()).is_err());
    let bytes = envelope.to_bytes().unwrap();
    for position in 0..bytes.len() {
        let mut broken = bytes.clone();
        broken[position] ^= 1;
        let verified = Envelope::from_bytes(&broken).and_then(|envelope| envelope.verify("manifest", &key.trusted()));
        assert!(verified.is_err(), "{position}");
    }
}

#[test]
fn a_second_signature_by_a_stranger_does_no_harm() {
    let key = SigningKey::from_seed(&[1; 32]);
    let mut envelope = Envelope::sign("manifest", b"{}", &key);
    envelope.signatures.insert(
        0,
        EnvelopeSignature {
            keyid: "unknown".into(),
            sig: "not base64!".into(),
        },
    );
    assert!(envelope.verify("manifest", &key.trusted()).is_ok());
}

#[test]
fn junk_under_a_keys_name_does_not_keep_the_key_from_signing() {
    let (old, new) = (SigningKey::from_seed(&[1; 32]), SigningKey::from_seed(&[2; 32]));
    let good = Envelope::sign("manifest", b"{}", &old);
    let junk = |sig: &str| EnvelopeSignature {
        keyid: new.key_id().into(),
        sig: sig.into(),
    };
    // no signature at all, the signature of another key, and one of another document
    let other = Envelope::sign("manifest", b"[]", &new).signatures.remove(0);
    for junk in [junk("AAAA"), junk(&good.signatures[0].sig), other] {
        let mut envelope = good.clone();
        envelope.signatures.insert(0, junk);
        assert!(envelope.verify("manifest", &new.trusted()).is_err());
        assert!(envelope.countersign("manifest", &new).unwrap());
        assert_eq!(envelope.verify("manifest", &new.trusted()).unwrap(), b"{}");
        assert_eq!(envelope.signatures.len(), 2, "the junk is gone");
        assert!(!envelope.countersign("manifest", &new).unwrap(), "it has signed now");
        assert!(envelope.verify("manifest", &old.trusted()).is_ok());
    }
}

#[test]
fn a_revoked_key_counts_for_nothing_and_a_second_signature_takes_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let old = SigningKey::create(path, "old", Role::Trainer).unwrap();
    let new = SigningKey::create(path, "new", Role::Trainer).unwrap();
    let mut envelope = Envelope::sign("manifest", b"{}", &old);
    assert!(envelope.verify("manifest", &TrustedKeys::load(path).unwrap()).is_ok());
    fs::copy(path.join("old.pub"), path.join("old.revoked")).unwrap();
    let keys = TrustedKeys::load(path).unwrap();
    assert_eq!(
        (keys.len(), keys.contains(old.key_id()), keys.is_revoked(old.key_id())),
        (1, false, true)
    );
    assert!(matches!(envelope.verify("manifest", &keys), Err(Error::Revoked(_))));
    assert!(envelope.countersign("manifest", &new).unwrap());
    assert!(!envelope.countersign("manifest", &new).unwrap());
    let (payload, signer) = envelope.verify_signer("manifest", &keys).unwrap();
    assert_eq!((payload.as_slice(), signer.as_str()), (&b"{}"[..], new.key_id()));
    let mut keys = keys;
    keys.revoke(new.key_id());
    assert!(keys.is_empty() && envelope.verify("manifest", &keys).is_err());
}

#[test]
fn a_readable_key_a_stray_public_key_and_an_empty_folder_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    assert!(TrustedKeys::load(path).is_err());
    assert!(SigningKey::load_or_create(path, "../x").is_err());
    // another role makes the first key just now: its folder is there, its private key, then its public key
    assert!(TrustedKeys::load_if_any(&path.join("no")).unwrap().is_none());
    fs::write(path.join("a.key"), "").unwrap();
    assert!(TrustedKeys::load_if_any(path).unwrap().is_none());
    fs::remove_file(path.join("a.key")).unwrap();
    SigningKey::create(path, "a", Role::Trainer).unwrap();
    assert!(TrustedKeys::load_if_any(path).unwrap().is_some());
    SigningKey::create(path, "b", Role::Trainer).unwrap();
    fs::copy(path.join("a.pub"), path.join("b.pub")).unwrap();
    let error = SigningKey::load_or_create(path, "b").unwrap_err();
    assert!(error.to_string().contains("belong"), "{error}");
    fs::write(path.join("c.pub"), "00").unwrap();
    assert!(TrustedKeys::load(path).is_err());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path.join("a.key"), fs::Permissions::from_mode(0o644)).unwrap();
        let error = SigningKey::load_or_create(path, "a").unwrap_err();
        assert!(error.to_string().contains("0600"), "{error}");
    }
}

#[test]
fn a_key_signs_only_documents_of_its_role() {
    let folder = tempfile::tempdir().unwrap();
    let keys = Role::ALL.map(|role| SigningKey::create(folder.path(), role.name(), role).unwrap());
    let trusted = TrustedKeys::load(folder.path()).unwrap();
    let kinds = [
        ("manifest", Role::Trainer),
        ("fold", Role::Trainer),
        ("share", Role::Trainer),
        ("assignment", Role::Release),
        ("statement", Role::Release),
        ("revocation", Role::Root),
    ];
    for (kind, needed) in kinds {
        for (role, key) in Role::ALL.iter().zip(&keys) {
            let verified = Envelope::sign(kind, b"{}", key).verify(kind, &trusted);
            match *role == needed {
                true => assert_eq!(verified.unwrap(), b"{}", "{role} {kind}"),
                false => assert!(
                    matches!(verified, Err(Error::Role { .. })),
                    "{role} {kind}: {verified:?}"
                ),
            }
        }
    }
}

#[test]
fn a_key_file_without_exactly_one_role_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    SigningKey::create(folder.path(), "trainer", Role::Trainer).unwrap();
    let public = folder.path().join("trainer.pub");
    let key = fs::read_to_string(&public).unwrap()[..64].to_owned();
    for wrong in ["", " trainer release", " king"] {
        fs::write(&public, format!("{key}{wrong}\n")).unwrap();
        assert!(TrustedKeys::load(folder.path()).is_err(), "{wrong:?}");
        assert!(
            SigningKey::load_or_create(folder.path(), "trainer").is_err(),
            "{wrong:?}"
        );
    }
    fs::write(&public, format!("{key} release\n")).unwrap();
    let error = SigningKey::load_or_create(folder.path(), "trainer").unwrap_err();
    assert!(error.to_string().contains("another role"), "{error}");
    assert!(SigningKey::load_or_create(folder.path(), "new").is_err());
}

/// The keys that are revoked, of the keys of `folder` with revocations as `key<signer`.
fn revoked(folder: &[(&str, Role)], given: &str) -> String {
    let mut keys = TrustedKeys::default();
    let mut names = BTreeMap::new();
    for (number, (name, role)) in folder.iter().enumerate() {
        let key = SigningKey::from_seed(&[number as u8 + 1; 32]);
        keys.insert(&key, *role);
        names.insert(*name, key.key_id().to_owned());
    }
    let mut revocations = Revocations::new();
    for one in given.split_whitespace() {
        let (key, signer) = one.split_once('<').unwrap();
        revocations
            .entry(names[key].clone())
            .or_default()
            .insert(names[signer].clone());
    }
    keys.revoke_by(&revocations);
    let revoked = names.into_iter().filter(|(_, id)| keys.is_revoked(id));
    revoked.map(|(name, _)| name).collect::<Vec<_>>().join(" ")
}

#[test]
fn only_a_root_key_revokes_others_and_a_revoked_one_no_longer() {
    let folder = [
        ("root", Role::Root),
        ("spare", Role::Root),
        ("release", Role::Release),
        ("trainer", Role::Trainer),
    ];
    for (given, expected) in [
        ("", ""),
        ("trainer<root", "trainer"),
        ("trainer<trainer", "trainer"),
        // a thief of a trainer's or a release key takes nothing but that key away
        ("release<trainer", ""),
        ("trainer<release root<release", ""),
        ("trainer<root release<trainer", "trainer"),
        // a thief of the root key, which then revokes itself or is revoked by the spare
        ("release<root trainer<root", "release trainer"),
        ("release<root trainer<root root<root", "root"),
        ("release<root root<spare", "root"),
        ("release<root release<spare root<spare", "release root"),
        ("release<root spare<root root<root", "root"),
        // nobody can tell which of the two is the thief
        ("spare<root root<spare release<root", "root spare"),
    ] {
        assert_eq!(revoked(&folder, given), expected, "{given}");
    }
}

#[test]
fn without_a_root_key_any_key_revokes_and_the_order_does_not_matter() {
    let folder = [
        ("release", Role::Release),
        ("trainer", Role::Trainer),
        ("trainer-old", Role::Trainer),
    ];
    for (given, expected) in [
        ("trainer-old<trainer", "trainer-old"),
        ("trainer<release", "trainer"),
        // a replica that knows the first revocation and a new one agree
        ("trainer-old<trainer release<trainer-old", "trainer-old"),
        ("trainer<trainer release<trainer", "trainer"),
        ("trainer<release release<trainer", "release trainer"),
    ] {
        assert_eq!(revoked(&folder, given), expected, "{given}");
    }
}
